"""Vision-language models of `transformers` with images, as they are: as one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    GemmaConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
)

import shardwright as sw

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
IMAGES: dict[str, Any] = {**SIZES, "image_size": 28, "patch_size": 14}
IMAGE_TOKEN = 120


def llava() -> nn.Module:
    text = LlamaConfig(**SIZES, vocab_size=128)
    vision = CLIPVisionConfig(**IMAGES)
    options: dict[str, Any] = {"image_token_index": IMAGE_TOKEN, "image_seq_length": 4}
    config = LlavaConfig(vision_config=vision, text_config=text, vision_feature_layer=-1, **options)
    return LlavaForConditionalGeneration(config)


def paligemma() -> nn.Module:
    text = GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=8, vocab_size=128)
    vision = SiglipVisionConfig(**IMAGES)
    options: dict[str, Any] = {"image_token_index": IMAGE_TOKEN, "projection_dim": 32}
    config = PaliGemmaConfig(
        vision_config=vision.to_dict(), text_config=text.to_dict(), hidden_size=32, **options
    )
    return PaliGemmaForConditionalGeneration(config)


@pytest.mark.parametrize("make", [llava, paligemma])
def test_a_model_of_images_and_texts_equals_one_device(make: Any) -> None:
    torch.manual_seed(0)
    net, ids = make(), torch.randint(1, 100, (4, 12))
    # Four patches of an image take the places of four tokens.
    ids[:, 1:5] = IMAGE_TOKEN
    batch = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(4, 3, 28, 28)}
    if make is paligemma:
        batch["token_type_ids"] = (torch.arange(12) > 6).long().expand(4, 12).contiguous()
    plan = sw.plan(net, (), batch, devices=2, mem_coeff=1000.0)
    assert plan.cuts
    result = sw.check(net, (), batch, plan)
    assert result.passes(), str(result)


class WithGrid(nn.Module):
    """A Qwen2.5-VL for images of one size, which is a buffer: lengths and shapes follow from it."""

    def __init__(self, net: nn.Module, grid: Tensor) -> None:
        super().__init__()
        self.net, self.grid = net, nn.Buffer(grid)

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.net(**batch, image_grid_thw=self.grid, use_cache=False).loss
        return loss


def test_qwen_for_images_of_one_size_equals_one_device() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    vision |= {"out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [0]}
    tokens = {"image_token_id": 120, "vision_start_token_id": 121, "vision_end_token_id": 122}
    text = {**SIZES, "num_key_value_heads": 2, "vocab_size": 128, "rope_parameters": rope}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, video_token_id=123, **tokens)
    net = Qwen2_5_VLForConditionalGeneration(config)
    ids, grid = torch.randint(3, 100, (4, 12)), torch.tensor([[1, 4, 4]] * 4)
    ids[:, 1], ids[:, 2:6] = 121, IMAGE_TOKEN
    # Positions follow from the tokens' values, so they are an input.
    types = (ids == IMAGE_TOKEN).int()
    positions, _ = net.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
    pixels = torch.randn(64, 3 * 2 * 14 * 14)
    batch = {"input_ids": ids, "labels": ids, "pixel_values": pixels, "position_ids": positions}
    model = WithGrid(net, grid)
    plan = sw.plan(model, (), batch, devices=2, mem_coeff=1000.0)
    assert plan.cuts
    result = sw.check(model, (), batch, plan)
    assert result.passes(), str(result)

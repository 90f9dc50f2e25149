"""Vision-language models of `transformers` with images, as they are: as one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GemmaConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
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
    if make is llava:
        # Its first call installs hooks under a lock, which TorchDynamo does not trace.
        net(**batch)
    plan = sw.plan(net, (), batch, devices=2, mem_coeff=1000.0)
    assert plan.cuts
    result = sw.check(net, (), batch, plan)
    assert result.passes(), str(result)

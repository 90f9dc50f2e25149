"""Unmodified models in their full size, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

LLAMA_3: dict[str, dict[str, int]] = {
    "8B": {},
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}


def llama_3(size: str, **changed: int) -> nn.Module:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 2**20,
        **LLAMA_3[size],
        **changed,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def qwen_3_32b() -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    )
    return transformers.Qwen3ForCausalLM(config)


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig())


def qwen_3() -> nn.Module:
    """Qwen3-30B-A3B."""
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=48, num_key_value_heads=4, head_dim=128, norm_topk_prob=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    """GPT-OSS 120B."""
    return transformers.GptOssForCausalLM(transformers.GptOssConfig())


def olmoe() -> nn.Module:
    """OLMoE-1B-7B."""
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(intermediate_size=1024))


def deepseek() -> nn.Module:
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config())


def language(make: Callable[[], nn.Module], batch: int, length: int) -> tuple[nn.Module, Any]:
    """A model and the arguments of a call with `batch` sequences of `length` tokens."""
    with torch.device("meta"):
        ids = torch.empty(batch, length, dtype=torch.long)
        return make(), {"input_ids": ids, "labels": ids, "use_cache": False}


class Denoiser(nn.Module):
    """The U-Net of Stable Diffusion XL (Podell et al., 2023), trained to predict noise."""

    def __init__(self) -> None:
        super().__init__()
        attention = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
        self.unet = diffusers.UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            layers_per_block=2,
            down_block_types=attention,
            up_block_types=tuple(kind.replace("Down", "Up") for kind in reversed(attention)),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )

    def forward(
        self,
        latents: Tensor,
        times: Tensor,
        words: Tensor,
        text: Tensor,
        sizes: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """
        Args:
            latents: with noise, `[batch, 4, 128, 128]`.
            times: `[batch]`.
            words: of a text encoder, `[batch, 77, 2048]`.
            text: as a whole, `[batch, 1280]`.
            sizes: of a picture and its crop, `[batch, 6]`.
            noise: as `latents`.
        """
        conditions = {"text_embeds": text, "time_ids": sizes}
        (found,) = self.unet(latents, times, words, added_cond_kwargs=conditions, return_dict=False)
        return nn.functional.mse_loss(found, noise)


def denoiser(batch: int) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        net, latents = Denoiser(), torch.empty(batch, 4, 128, 128)
        return net, {
            "latents": latents,
            "times": torch.empty(batch, dtype=torch.long),
            "words": torch.empty(batch, 77, 2048),
            "text": torch.empty(batch, 1280),
            "sizes": torch.empty(batch, 6),
            "noise": latents,
        }


class Recommender(nn.Module):
    """A DLRM (Naumov et al., 2019) with the sizes of MLPerf's: 26 tables of at most 40 million
    rows, 128 wide, 13 dense features."""

    ROWS = (
        *(40_000_000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40_000_000, 3067956, 405282),
        *(10, 2209, 11938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590152, 12973),
        *(108, 36),
    )

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in self.ROWS)
        self.bottom = layers(13, 512, 256, width)
        pairs = (len(self.ROWS) + 1) * len(self.ROWS) // 2
        self.top = layers(width + pairs, 1024, 1024, 512, 256, 1)[:-1]

    def forward(self, dense: Tensor, categories: Tensor, labels: Tensor) -> Tensor:
        """
        Args:
            dense: `[batch, 13]`.
            categories: `[tables, batch, rows of a bag]`.
            labels: `[batch]`, 0 or 1.
        """
        bottom = self.bottom(dense)
        bags = [table(rows) for table, rows in zip(self.tables, categories, strict=True)]
        features = torch.stack([bottom, *bags], dim=1)
        products = features @ features.mT
        first, second = torch.tril_indices(features.shape[1], features.shape[1], -1)
        top = self.top(torch.cat([bottom, products[:, first, second]], dim=1))
        return nn.functional.binary_cross_entropy_with_logits(top.squeeze(-1), labels)


def layers(*sizes: int) -> nn.Sequential:
    """Linear layers with a ReLU behind each."""
    pairs = pairwise(sizes)
    return nn.Sequential(*(each for a, b in pairs for each in (nn.Linear(a, b), nn.ReLU())))


def recommender(batch: int, bag: int = 1) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        net = Recommender()
        categories = torch.empty(len(net.ROWS), batch, bag, dtype=torch.long)
        dense, labels = torch.empty(batch, 13), torch.empty(batch)
        return net, {"dense": dense, "categories": categories, "labels": labels}

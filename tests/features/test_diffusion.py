"""Unmodified models of `diffusers`: U-Nets, transformers and an autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw

diffusers = pytest.importorskip("diffusers")

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _times() -> Tensor:
    return torch.arange(4) * 37


def unet() -> Call:
    """Of Stable Diffusion XL, in small."""
    net = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        norm_num_groups=8,
    )
    conditions = {"text_embeds": torch.randn(4, 32), "time_ids": torch.randn(4, 6)}
    args = torch.randn(4, 4, 8, 8), _times(), torch.randn(4, 7, 32)
    return net, args, {"added_cond_kwargs": conditions, "return_dict": False}


def transformer() -> Call:
    """DiT, whose norms are scaled by time and class."""
    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    labels = {"timestep": _times(), "class_labels": torch.arange(4)}
    return net, (torch.randn(4, 4, 8, 8),), {**labels, "return_dict": False}


def joint_transformer() -> Call:
    """Of Stable Diffusion 3: pictures and texts attend to each other."""
    net = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    args = torch.randn(4, 4, 8, 8), torch.randn(4, 7, 32), torch.randn(4, 64), _times()
    return net, args, {"return_dict": False}


def autoencoder() -> Call:
    net = diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    return net, (torch.randn(4, 3, 8, 8),), {"return_dict": False}


@pytest.mark.parametrize("make", [unet, transformer, joint_transformer, autoencoder])
@pytest.mark.parametrize("mem_coeff", [0.1, 10.0])
def test_they_are_cut_and_equal_the_eager_module(
    make: Callable[[], Call], mem_coeff: float
) -> None:
    torch.manual_seed(0)
    net, args, kwargs = make()
    plan = sw.plan(net.eval(), args, kwargs, devices=2, mem_coeff=mem_coeff)
    assert len(plan.cuts) > 20
    assert sw.check(net, args, kwargs, plan).passes()

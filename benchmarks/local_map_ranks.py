"""What `bench_local_map.py` runs on every rank: steps of local maps and PyTorch's own, in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import shardwright as sw
from benchmarks.data_parallel_ranks import (
    SIZES,
    Cases,
    Step,
    ddp,
    fsdp,
    layer_mb,
    layers_of,
    main,
    model,
    planned,
)


def attention(net: nn.Module) -> None:
    """Leaves the attention of each layer as it is. It reads activations, positions, and their
    cosines and sines."""
    for layer in layers_of(net):
        part = layer.get_submodule("self_attn")
        part.register_forward_pre_hook(without_mask, with_kwargs=True)
        sw.local_map(part, "b _s _h, _ _s, _ _s _d, _ _s _d -> b _s _h")


def without_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The mask is causal. In eager code, as under DDP, `transformers` leaves it out, but not where
    it is traced; capture finds that out for attention that it knows."""
    return args, {**kwargs, "attention_mask": None}


def whole(net: nn.Module) -> None:
    notation = f"b _s, b _s -> (), b _s {SIZES['vocabulary']}"
    sw.local_map(net, notation, partial=("mean", None))


def ours(mark: Callable[[nn.Module], None], **options: Any) -> Step:
    net, args, kwargs = model()
    mark(net)
    return planned(net, args, kwargs, mode="data_parallel", **options)


def ours_sharded(mark: Callable[[nn.Module], None]) -> Step:
    """With buckets of the size of a layer, as `fully_shard` has."""
    return ours(mark, bucket_mb=layer_mb(), hsdp=sw.OptimizerParallel("level3"))


def cases() -> Cases:
    """Name → ours and PyTorch's."""
    return {
        "attention / DDP": (lambda: ours(attention), ddp),
        "attention / FSDP2": (lambda: ours_sharded(attention), lambda: fsdp(reshard=True)),
        "whole model / DDP": (lambda: ours(whole), ddp),
        "whole model / FSDP2": (lambda: ours_sharded(whole), lambda: fsdp(reshard=True)),
    }


if __name__ == "__main__":
    main(cases)

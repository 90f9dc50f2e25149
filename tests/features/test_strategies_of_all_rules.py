"""Every family of rules takes tuples and layouts alike, and computes what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.rules import rule_of


class Applied(nn.Module):
    """One operator on parameters (floating tensors, so that they get gradients) and buffers."""

    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.op = sw.Op(function)
        self.names = [f"t{index}" for index in range(len(tensors))]
        for name, tensor in zip(self.names, tensors, strict=True):
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(self) -> Any:
        return self.op(*(getattr(self, name) for name in self.names))


def ids(*shape: int, below: int = 8) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).mul(5).remainder(below).reshape(shape)


def floats(*shape: int) -> Tensor:
    return torch.sin(1 + torch.arange(torch.Size(shape).numel())).reshape(shape)


FAMILIES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear": (F.linear, (floats(8, 4), floats(12, 4))),
    "matmul": (torch.matmul, (floats(4, 8), floats(8, 4))),
    "batched matmul": (torch.matmul, (floats(4, 2, 4), floats(4, 4, 8))),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), (floats(4, 2, 4), floats(4, 4, 8))),
    "convolution": (F.conv2d, (floats(4, 4, 6, 6), floats(8, 4, 3, 3))),
    "attention": (F.scaled_dot_product_attention, (floats(4, 4, 8, 2),) * 3),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (floats(1, 4, 8, 2),) * 3,
    ),
    "embedding": (lambda table, i: F.embedding(i, table), (floats(8, 4), ids(4, 6))),
    "cross entropy": (F.cross_entropy, (floats(4, 8), ids(4))),
    "mse loss": (F.mse_loss, (floats(4, 8), floats(4, 8) + 1)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        (floats(4, 4, 8), *[floats(8)] * 2),
    ),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (floats(8, 4, 2), floats(4), floats(4)),
    ),
    "softmax": (lambda x: torch.softmax(x, -1), (floats(4, 4, 8),)),
    "relu": (torch.relu, (floats(4, 8),)),
    "broadcast add": (torch.add, (floats(4, 8), floats(8))),
    "sum": (lambda x: x.sum(1), (floats(4, 8),)),
    "mean": (lambda x: x.mean((0, 2)), (floats(4, 8, 4),)),
    "reshape": (lambda x: x.reshape(4, 4, 4), (floats(4, 16),)),
    "transpose": (lambda x: x.transpose(0, 1), (floats(4, 8, 3),)),
    "expand": (lambda x: x.expand(4, 8, 4), (floats(8, 1),)),
    "cat": (lambda a, b: torch.cat((a, b), 1), (floats(4, 8), floats(4, 4))),
    "split": (lambda x: x.split(4, 1), (floats(4, 8),)),
    "gather": (lambda x, i: x.gather(1, i), (floats(4, 8), ids(4, 4))),
    "max pool": (lambda x: F.max_pool2d(x, 2), (floats(4, 4, 4, 4),)),
}


def pinned(name: str, strategy: tuple[Any, ...] | None) -> nn.Module:
    function, tensors = FAMILIES[name]
    net = Applied(function, tuple(tensor.clone() for tensor in tensors))
    if strategy is not None:
        sw.shard(net.op, strategy)
    return net


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_takes_tuples_and_layouts_and_equals_one_device(name: str) -> None:
    (op,) = (op for op in sw.capture(pinned(name, None)).ops if op.name == "op")
    found = rule_of(op)
    assert found is not None
    factors = [f for dims in found.inputs for f in dims if f in found.factors]
    one, *other = [f for f in dict.fromkeys(factors) if found.capacity[f] % 2 == 0]
    mesh = sw.Layout((2, 2), ("x", "y"))
    cuts = {one: (0,), **dict.fromkeys(other[:1], (1,))}
    layouts, _ = found.layouts(mesh, cuts)
    exact = tuple(TensorLayout(mesh, layout.axes) for layout in layouts)
    for strategy in (tuple(layout.shard_counts for layout in layouts), exact):
        net = pinned(name, strategy)
        plan = sw.plan(net, devices=4, mode="semi_auto")
        assert plan.cuts["op"] == cuts
        result = sw.check(net, (), {}, plan)
        assert result.passes(1e-9), (strategy, result)

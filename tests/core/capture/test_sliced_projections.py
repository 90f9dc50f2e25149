"""Slices that divide the result of one projection are one split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw


class Projected(nn.Module):
    """The product of parts of one projection, which are sliced at `ends`."""

    def __init__(self, bias: bool, *ends: tuple[int, int]) -> None:
        super().__init__()
        self.projection, self.ends = nn.Linear(8, 24, bias=bias), ends

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(x)
        return torch.stack([y[..., start:end].mean() for start, end in self.ends]).prod()


def operators(net: nn.Module, x: Tensor) -> list[str]:
    return [op.short_name for op in sw.capture(net, (x,)).ops]


PARTS = (16, 20), (0, 16), (20, 24)


@pytest.mark.parametrize("bias", [False, True])
def test_parts_are_split_at_once_and_each_device_has_its_rows_of_all(bias: bool) -> None:
    net, x = Projected(bias, *PARTS).double(), torch.randn(4, 8, dtype=torch.float64)
    assert operators(net, x).count("split_with_sizes") == 1
    sw.shard(net.projection, ((1, 1), (4, 1)))
    plan = sw.plan(net, (x,), devices=4, mode="sharding_propagation")
    (split,) = (op.name for op in plan.graph.ops if op.short_name == "split_with_sizes")
    assert plan.cuts[split] == {"s": (0,)}
    result = sw.check(net, (x,), {}, plan)
    assert result.passes(1e-9) and result.counted_bytes == result.planned_bytes, str(result)


@pytest.mark.parametrize("ends", [PARTS[:2], (*PARTS, (0, 8)), ((0, 24), (0, 12))])
def test_slices_that_leave_elements_out_or_overlap_stay(ends: tuple[tuple[int, int], ...]) -> None:
    assert "split_with_sizes" not in operators(Projected(True, *ends), torch.randn(4, 8))

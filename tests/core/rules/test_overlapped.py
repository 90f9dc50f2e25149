"""Windows that add to sharded dimensions, in every way of sharding them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, randn

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import NEXT, PREVIOUS

aten = torch.ops.aten


def r(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float64)


def test_patches_of_a_transposed_convolution_are_not_exchanged() -> None:
    target, arguments = aten.conv_transpose2d.input, (r(1, 2, 4, 4), r(2, 3, 2, 2), None, [2, 2])
    found = check(target, *arguments)
    assert str(found) == "b k s t, k j _ _ -> b j s t"
    assert not found.reductions(op_of(target, *arguments), {"s": 2, "t": 2})


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (3, ([2], [1], [1])),
        (4, ([2], [1])),
        (4, ([2], [0], [0])),
        (3, ([1], [1])),
        (1, ([2], [0], [1])),
        (3, ([2], [1], [1], 1, [2])),
        (3, ([1], [0])),
    ],
)
def test_overlapping_windows_are_added(kernel, options) -> None:
    arguments = (r(2, 2, 12), r(2, 2, kernel), None, *options)
    found = check(aten.conv_transpose1d.default, *arguments)
    assert str(found) in ("b k s, k j _ -> b j s", "b k _, k j _ -> b j _")
    assert "s" in found.factors or options[:2] in (([2], [0]), ([1], [0]))


def test_corners_biases_and_groups() -> None:
    x, plane = r(1, 2, 4, 6), ([2, 2], [1, 1], [1, 1])
    found = check(aten.conv_transpose2d.input, x, r(2, 3, 3, 3), r(3), *plane)
    assert str(found) == "b _ s t, _ j _ _, j -> b j s t"
    found = check(
        aten.conv_transpose2d.input, r(1, 4, 4, 6), r(4, 1, 4, 4), r(4), *plane[:2], [0, 0], 4
    )
    assert str(found) == "b g s t, g _ _ _, g -> b g s t"
    general = ([2, 2], [1, 1], [1, 1], True, [1, 1], 1)
    found = check(aten.convolution.default, x, r(2, 3, 3, 3), None, *general)
    assert str(found) == "b k s t, k j _ _ -> b j s t"


def test_what_is_exchanged_is_counted() -> None:
    op = op_of(aten.conv_transpose1d.default, r(1, 2, 8), r(2, 3, 4), None, [2], [1])
    found = rule_of(op)
    assert found is not None
    exchanges = found.reductions(op, {"s": 4})
    assert [(each.operation, each.shape) for each in exchanges] == [
        (NEXT, (1, 3, 1)),
        (PREVIOUS, (1, 3, 1)),
    ]

"""Windows along sharded dimensions, in every way of cutting them."""

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


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (3, ([1], [1])),
        (3, ([2], [1])),
        (7, ([2], [3])),
        (4, ([2], [1])),
        (2, ([2],)),
        (1, ([2],)),
        (3, ([1], [2], [2])),
    ],
)
def test_a_line_is_cut_whatever_its_windows(kernel, options) -> None:
    found = check(aten.conv1d.default, r(2, 2, 12), r(2, 2, kernel), None, *options)
    assert str(found) == "b k s, j k _ -> b j s"


def test_corners_of_a_plane_are_exchanged_too() -> None:
    found = check(aten.conv2d.default, r(1, 2, 8, 6), r(2, 2, 3, 3), r(2), [1, 1], [1, 1])
    assert str(found) == "b _ s t, j _ _ _, j -> b j s t"
    assert found.main is not None and found.main.labels["s"] == "I"
    grouped = (r(4), [1, 1], [1, 1], [1, 1], 4)
    found = check(aten.conv2d.default, r(1, 4, 8, 8), r(4, 1, 3, 3), *grouped)
    assert str(found) == "b g s t, g _ _ _, g -> b g s t"


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.max_pool2d.default, ([3, 3], [2, 2], [1, 1])),
        (aten.max_pool2d.default, ([2],)),
        (aten.avg_pool2d.default, ([3, 3], [2, 2], [1, 1])),
    ],
)
def test_pools_pad_the_outermost_shards_only(target, arguments) -> None:
    assert str(check(target, r(1, 2, 8, 8) - 5, *arguments)) == "b c s t -> b c s t"


def test_a_halo_has_to_fit_into_one_shard() -> None:
    op = op_of(aten.conv1d.default, r(1, 1, 12), r(1, 1, 9), None, [1], [4])
    found = rule_of(op)
    assert found is not None and found.capacity["s"] == 3


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.conv2d.default, (r(2, 2, 3, 3),)),
        (aten.conv2d.padding, (r(2, 2, 3, 3), None, [1, 1], "same")),
        (aten.avg_pool2d.default, ([3, 3], [1, 1], [1, 1], False, False)),
        (aten.max_pool2d.default, ([2, 2], [2, 2], [0, 0], [1, 1], True)),
    ],
)
def test_shards_that_would_not_be_aligned_stay_whole(target, arguments) -> None:
    found = rule_of(op_of(target, r(2, 2, 8, 8), *arguments))
    assert found is not None and not {"s", "t"} & set(found.factors)


def test_what_is_exchanged_is_counted() -> None:
    op = op_of(aten.conv2d.default, r(1, 2, 8, 6), r(2, 2, 5, 3), None, [1, 1], [2, 1])
    found = rule_of(op)
    assert found is not None
    exchanges = found.reductions(op, {"s": 2, "t": 2})
    assert [(each.kind, each.shape) for each in exchanges] == [
        (PREVIOUS, (1, 2, 2, 3)),
        (NEXT, (1, 2, 2, 3)),
        (PREVIOUS, (1, 2, 8, 1)),
        (NEXT, (1, 2, 8, 1)),
    ]
    patches = op_of(aten.conv2d.default, r(1, 2, 8, 8), r(2, 2, 2, 2), None, [2, 2])
    found = rule_of(patches)
    assert found is not None and not found.reductions(patches, {"s": 2})


def test_patches_that_a_transposed_convolution_writes_are_cut() -> None:
    found = check(aten.conv_transpose2d.input, r(1, 2, 4, 4), r(2, 3, 2, 2), None, [2, 2])
    assert str(found) == "b k s t, k j _ _ -> b j s t"
    overlapping = op_of(aten.conv_transpose2d.input, r(1, 2, 4, 4), r(2, 3, 3, 3), None, [2, 2])
    assert not {"s", "t"} & set(getattr(rule_of(overlapping), "factors", ()))

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
    ("size", "kernel", "options"),
    [
        (16, 3, ([1],)),
        (16, 5, ([1],)),
        (14, 3, ([1], [2])),
        (10, 3, ([2],)),
        (12, 1, ([1], [2])),
        (16, 3, ([1], [0], [2])),
        (12, 2, ([4], [2])),
        (12, 2, ([1], "same")),
        (12, 3, ([1], "same", [2])),
        (8, 3, ([1], "valid")),
    ],
)
def test_windows_shift_against_rows(size, kernel, options) -> None:
    is_named = any(isinstance(option, str) for option in options)
    target = aten.conv1d.padding if is_named else aten.conv1d.default
    found = check(target, r(2, 2, size), r(2, 2, kernel), None, *options)
    assert str(found) == "b k s, j k _ -> b j s"


@pytest.mark.parametrize(
    ("target", "x", "arguments"),
    [
        (aten.conv2d.padding, r(1, 2, 6, 8), (r(2, 2, 4, 2), None, [1, 1], "same")),
        (aten.avg_pool2d.default, r(1, 2, 6, 8), ([3, 3], [1, 1], [1, 1], False, False)),
        (aten.avg_pool2d.default, r(1, 2, 7, 8), ([3, 3], [2, 2], [1, 0], True, True)),
        (aten.avg_pool2d.default, r(2, 6, 8), ([3, 2], [2, 2], [1, 0], True, False)),
        (aten.avg_pool2d.default, r(1, 2, 6, 8), ([3, 3], [1, 1], [1, 1], False, False, 4)),
        (aten.max_pool2d.default, r(1, 2, 8, 8), ([2, 2], [2, 2], [0, 0], [1, 1], True)),
        (aten.max_pool2d.default, r(1, 2, 8, 8), ([3, 3], [2, 2], [0, 1], [1, 1], True)),
        (aten.max_pool2d.default, r(1, 2, 8, 8), ([3, 3], [1, 1])),
    ],
)
def test_images_of_uneven_windows(target, x, arguments) -> None:
    found = check(target, x, *arguments)
    assert {"s", "t"} & set(found.factors)


def test_what_is_exchanged_is_counted() -> None:
    op = op_of(aten.conv2d.default, r(1, 2, 8, 6), r(2, 2, 5, 3), None, [1, 1], [2, 1])
    found = rule_of(op)
    assert found is not None
    exchanges = found.reductions(op, {"s": 2, "t": 2})
    assert [(each.operation, each.shape) for each in exchanges] == [
        (PREVIOUS, (1, 2, 2, 3)),
        (NEXT, (1, 2, 2, 3)),
        (PREVIOUS, (1, 2, 8, 1)),
        (NEXT, (1, 2, 8, 1)),
    ]
    patches = op_of(aten.conv2d.default, r(1, 2, 8, 8), r(2, 2, 2, 2), None, [2, 2])
    found = rule_of(patches)
    assert found is not None and not found.reductions(patches, {"s": 2})

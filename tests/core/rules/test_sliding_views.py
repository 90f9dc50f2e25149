"""Rows of sharded dimensions that move, in every way of sharding them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.rules.oracle import check

aten = torch.ops.aten


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_overlapping_windows_of_a_dimension() -> None:
    assert str(check(aten.unfold.default, randn(2, 8), 1, 3, 1)) == "b s -> b s _"
    assert str(check(aten.unfold.default, randn(10, 2), 0, 4, 2)) == "b s -> b s _"
    assert str(check(aten.unfold.default, randn(2, 7), 1, 3, 2)) == "b _ -> b _ _"
    assert str(check(aten.unfold.default, randn(16), 0, 2, 4)) == "b -> b _"
    assert str(check(aten.unfold.default, randn(2, 7), 1, 3, 1)) == "b _ -> b _ _"


def test_windows_of_images_and_back() -> None:
    x = randn(2, 2, 6, 6)
    patches = ([3, 3], [1, 1], [0, 0], [3, 3])
    assert str(check(aten.im2col.default, x, *patches)) == "b c s _ -> b c s"
    assert str(check(aten.col2im.default, randn(2, 18, 4), [6, 6], *patches)) == "b c s -> b c s _"
    overlapping = ([3, 3], [1, 1], [1, 1], [1, 1])
    assert str(check(aten.im2col.default, x, *overlapping)) == "b c s _ -> b c s"
    back = check(aten.col2im.default, randn(2, 18, 36), [6, 6], *overlapping)
    assert str(back) == "b c s -> b c s _"
    found = check(aten.im2col.default, randn(2, 2, 8, 3), [3, 3], [1, 1], [0, 1], [1, 1])
    assert found.capacity["s"] == 2


def test_constants_pad_the_outermost_shards() -> None:
    assert str(check(aten.constant_pad_nd.default, randn(2, 4, 6), [1, 1])) == "b s t -> b s t"
    found = check(aten.constant_pad_nd.default, randn(2, 6, 6), [1, -1, 2, 0], 7.0)
    assert str(found) == "b s t -> b s t"
    assert str(check(aten.pad.default, randn(2, 4, 6), [0, 0, 0, 1])) == "b _ t -> b _ t"


@pytest.mark.parametrize(("mode", "shards"), [("circular", 6), ("replicate", 6), ("reflect", 3)])
def test_rows_of_the_image_pad_the_outermost_shards(mode: str, shards: int) -> None:
    padded = check(aten.pad.default, randn(2, 4, 12), [2, 4, 0, 0], mode)
    assert str(padded) == "b s t -> b s t"
    padded = check(aten.pad.default, randn(2, 12, 6), [2, 1, 2, 4], mode)
    # A row that is mirrored is not the border itself.
    assert padded.capacity["s"] == (3 if mode != "reflect" else 2)


def test_rows_move_around_the_end() -> None:
    assert str(check(aten.roll.default, randn(4, 6), [1, -2], [0, -1])) == "b s -> b s"
    assert str(check(aten.roll.default, randn(12), [7, 2], [0, 0])) == "b -> b"
    assert str(check(aten.roll.default, randn(4, 6), [1])) == "_ _ -> _ _"


def test_reversed_shards_swap_places() -> None:
    assert str(check(aten.flip.default, randn(2, 6, 4), [1])) == "b s t -> b s t"
    assert str(check(aten.flip.default, randn(4, 6), [0, -1])) == "b s -> b s"
    assert str(check(aten.flip.default, torch.arange(12), [0])) == "b -> b"
    assert str(check(aten.flip.default, randn(4).sum(), [])) == "() -> ()"

"""Resized images, in every way of sharding them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, randn

from core.rules.oracle import check, op_of, operator_name
from shardwright.core.rules import rule_of

aten = torch.ops.aten


def image(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float64)


LINE, PLANE, VOLUME = image(2, 2, 8), image(2, 2, 6, 6), image(1, 2, 4, 4, 2)


@pytest.mark.parametrize(
    ("target", "x", "arguments"),
    [
        (aten.upsample_nearest1d.vec, LINE, (None, [2.0])),
        (aten.upsample_nearest2d.vec, PLANE, (None, [2.0, 2.0])),
        (aten.upsample_nearest2d.default, PLANE, ([9, 9],)),
        (aten._upsample_nearest_exact2d.vec, PLANE, ([4, 8], None)),
        (aten.upsample_nearest1d.vec, image(2, 2, 8), ([4], None)),
        (aten.upsample_nearest1d.vec, image(2, 2, 8), (None, [1.5])),
        (aten._upsample_nearest_exact1d.vec, image(2, 2, 12), (None, [0.75])),
    ],
    ids=operator_name,
)
def test_repeated_pixels(target, x, arguments) -> None:
    assert check(target, x, *arguments).factors[:2] == ("b", "c")


@pytest.mark.parametrize(
    ("target", "x", "arguments"),
    [
        (aten.upsample_nearest1d.vec, image(1, 1, 4), (None, [3.2])),
        (aten._upsample_nearest_exact1d.vec, image(1, 1, 4), (None, [3.2])),
        (aten.upsample_nearest1d.default, image(1, 1, 4), ([8], 1.5)),
        (aten.upsample_nearest1d.vec, image(1, 1, 4).float(), ([164], None)),
    ],
    ids=operator_name,
)
def test_pixels_that_are_not_repeated_equally_often_stay_whole(target, x, arguments) -> None:
    assert "s" not in check(target, x, *arguments).factors


@pytest.mark.parametrize(
    "target",
    [
        aten.upsample_bilinear2d.vec,
        aten.upsample_bicubic2d.vec,
        aten._upsample_bilinear2d_aa.vec,
        aten._upsample_bicubic2d_aa.vec,
    ],
    ids=operator_name,
)
def test_resized_integers_are_rounded_as_on_one_device(target) -> None:
    x = torch.randint(0, 256, (2, 8, 8, 8), dtype=torch.uint8)
    assert check(target, x, [12, 4], False, None).factors == ("b", "c")


@pytest.mark.parametrize(
    ("target", "x", "arguments"),
    [
        (aten.upsample_linear1d.vec, LINE, ([16], False, None)),
        (aten.upsample_linear1d.vec, LINE, ([12], True, None)),
        (aten.upsample_linear1d.vec, LINE, (None, False, [0.5])),
        (aten.upsample_linear1d.default, LINE, ([10], False, 1.3)),
        (aten.upsample_bilinear2d.vec, PLANE, ([12, 12], True, None)),
        (aten.upsample_bilinear2d.vec, PLANE, ([12, 5], False, None)),
        (aten.upsample_bilinear2d.default, PLANE, ([6, 12], False, None, 2.0)),
        (aten.upsample_bicubic2d.vec, PLANE, (None, False, [2.0, 1.0])),
        (aten.upsample_bicubic2d.default, PLANE, ([8, 6], True)),
        (aten._upsample_bilinear2d_aa.vec, PLANE, ([2, 4], False, None)),
        (aten._upsample_bilinear2d_aa.default, PLANE, ([12, 3], True)),
        (aten._upsample_bicubic2d_aa.vec, image(1, 2, 8, 12), ([4, 6], False, None)),
        (aten.upsample_trilinear3d.vec, VOLUME, (None, False, [2.0, 1.5, 1.0])),
    ],
    ids=operator_name,
)
def test_rows_around_a_position(target, x, arguments) -> None:
    assert "s" in check(target, x, *arguments).factors


def test_sizes_without_common_shards_stay_whole() -> None:
    found = rule_of(op_of(aten.upsample_bilinear2d.vec, PLANE, [11, 5], False, None))
    assert found is not None and found.factors == ("b", "c")


def test_a_halo_has_to_fit_into_one_shard() -> None:
    # The scale of the call moves all positions into the first rows.
    found = check(aten.upsample_linear1d.default, LINE, [16], False, 8.0)
    assert found.capacity["s"] == 2


def test_float32_positions_are_those_of_pytorch() -> None:
    x = randn(1, 1, 512)
    assert "s" in check(aten.upsample_linear1d.vec, x, [1024], True, None).factors

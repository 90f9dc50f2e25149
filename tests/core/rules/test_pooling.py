import pytest
import torch
from torch import randn

from core.rules.oracle import check

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float64)


LINE, PLANE, VOLUME = image(6, 4, 8), image(6, 4, 6, 6), image(4, 6, 4, 4, 4)


@pytest.mark.parametrize(
    "target, x, args",
    [
        (aten.max_pool1d.default, LINE, ([2],)),
        (aten.max_pool2d.default, PLANE, ([3, 3], [1, 1], [1, 1])),
        (aten.max_pool2d_with_indices.default, PLANE, ([2, 2],)),
        (aten.max_pool3d.default, VOLUME, ([2, 2, 2],)),
        (aten.avg_pool1d.default, LINE, ([2],)),
        (aten.avg_pool2d.default, PLANE, ([3, 3], [2, 2], [1, 1])),
        (aten.avg_pool3d.default, VOLUME, ([2, 2, 2],)),
        (aten.adaptive_avg_pool1d.default, LINE, ([3],)),
        (aten.adaptive_avg_pool2d.default, PLANE, ([4, 1],)),
        (aten._adaptive_avg_pool2d.default, PLANE, ([1, 1],)),
        (aten.adaptive_avg_pool3d.default, VOLUME, ([1, 2, 1],)),
        (aten.adaptive_max_pool1d.default, LINE, ([3],)),
        (aten.adaptive_max_pool2d.default, PLANE, ([2, 2],)),
        (aten.adaptive_max_pool3d.default, VOLUME, ([2, 2, 2],)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_batch_and_channels_may_be_cut(target, x, args) -> None:
    assert check(target, x, *args).factors[:2] == ("b", "c")


def test_a_single_image_is_cut_by_channel() -> None:
    assert check(aten.max_pool2d.default, image(6, 4, 4), [2, 2]).factors == ("c", "s", "t")


def test_pixels_are_shuffled_one_channel_at_a_time() -> None:
    assert check(aten.pixel_shuffle.default, image(6, 8, 3, 3), 2).factors == ("b", "c", "s", "t")
    assert check(aten.pixel_unshuffle.default, image(6, 2, 4, 4), 2).factors == ("b", "c", "s", "t")
    assert check(aten.pixel_shuffle.default, image(4, 3, 4, 3, 3), 2).factors == (
        "b",
        "d",
        "s",
        "t",
    )


def test_channels_are_shuffled_anywhere_in_space() -> None:
    found = check(aten.channel_shuffle.default, image(6, 4, 2, 3), 2)
    assert found.factors == ("b", "s", "t")


def test_the_average_of_all_pixels_is_a_partial_sum() -> None:
    found = check(aten.adaptive_avg_pool2d.default, PLANE, [1, 1])
    assert str(found) == "b c s t -> b c _ _"
    assert found.reduced == {"s", "t"}
    assert check(aten.adaptive_avg_pool1d.default, LINE, [1]).reduced == {"s"}


def test_adaptive_pooling_is_cut_between_outputs_of_equally_many_rows() -> None:
    found = check(aten.adaptive_avg_pool2d.default, PLANE, [2, 1])
    assert str(found) == "b c s t -> b c s _"
    assert found.capacity["s"] == 2 and found.reduced == {"t"}
    assert str(check(aten.adaptive_avg_pool2d.default, PLANE, [4, 3])) == "b c _ t -> b c _ t"
    maxima = check(aten.adaptive_max_pool3d.default, VOLUME, [2, 1, 4])
    assert str(maxima) == "b c s _ u -> b c s _ u, b c s _ u"


def test_the_maximum_of_an_image_is_that_of_the_maxima_of_its_shards() -> None:
    # Rounded, as the first of equal elements is the maximum.
    found = check(aten.adaptive_max_pool2d.default, PLANE.round(), [1, 1])
    assert str(found) == "b s t u -> b s _ _, b s _ _"
    assert check(aten.adaptive_max_pool3d.default, VOLUME, [1, 1, 1]).complete == {"t", "u", "v"}


def test_positions_of_maxima_in_shards_are_those_in_the_image() -> None:
    overlapping = ([3, 3], [2, 1], [1, 1])
    for target, x, args in (
        (aten.max_pool1d_with_indices.default, LINE, ([2],)),
        (aten.max_pool2d_with_indices.default, PLANE, overlapping),
        (aten.max_pool2d_with_indices.default, image(4, 6, 4), ([2, 2],)),
        (aten.max_pool3d_with_indices.default, VOLUME, ([2, 2, 2],)),
    ):
        found = check(target, x, *args)
        assert found.outputs[0] == found.outputs[1] and "s" in found.factors

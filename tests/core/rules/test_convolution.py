import pytest
import torch
from torch import Tensor, randn

from core.rules.oracle import check, operator_name
from shardwright.core.graph.custom_ops import padded_convolution

aten = torch.ops.aten


def r(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    "target, x, w, rest",
    [
        (aten.conv1d.default, r(6, 4, 8), r(4, 4, 3), (None, [2], [1])),
        (aten.conv2d.default, r(6, 4, 6, 6), r(6, 4, 3, 3), (None, [2, 2], [1, 1], [2, 2])),
        (aten.conv2d.padding, r(2, 4, 6, 6), r(6, 4, 3, 3), (None, [1, 1], "same")),
        (aten.conv3d.default, r(4, 2, 3, 3, 3), r(4, 2, 2, 2, 2), ()),
        (aten.conv_transpose1d.default, r(6, 4, 5), r(4, 6, 3), (None, [2], [1], [1])),
        (aten.conv_transpose2d.input, r(2, 4, 4, 4), r(4, 6, 3, 3), ()),
        (aten.conv_transpose3d.input, r(2, 4, 2, 2, 2), r(4, 2, 2, 2, 2), ()),
    ],
    ids=operator_name,
)
def test_batch_and_both_channels_may_be_cut(target, x, w, rest) -> None:
    found = check(target, x, w, *rest)
    assert set(found.factors) >= {"b", "j", "k"}
    assert found.reduced == {"k"}
    assert found.main is not None
    assert found.main.exclusive == (("j", "k"),)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    ("stride", "pad", "width"), [(1, [1, 1, 1, 1], 3), (2, [0, 1, 0, 1], 3), (2, [2, 0, 1, 1], 4)]
)
def test_padding_before_a_convolution_leaves_space_divisible(
    mode: str, stride: int, pad: list[int], width: int
) -> None:
    options = ([stride] * 2, [1, 1], 1, pad, mode)
    found = check(padded_convolution, r(2, 4, 8, 12), r(6, 4, width, width), *options)
    assert str(found) == "b k s t, j k _ _ -> b j s t"
    assert found.capacity["s"] >= 2
    assert found.capacity["t"] == 12 // stride or mode == "reflect" or width == 4


def test_padded_rows_of_depthwise_and_unbatched_convolutions() -> None:
    options = ([1, 1], [2, 1], 4, [1, 1, 2, 2], "constant", 3.0)
    found = check(padded_convolution, r(2, 4, 8, 12), r(8, 1, 3, 3), *options)
    assert str(found) == "b g s t, g _ _ _ -> b g s t"
    found = check(padded_convolution, r(4, 12), r(6, 4, 3), [1], [1], 1, [2, 0], "replicate")
    assert str(found) == "k s, j k _ -> j s"


@pytest.mark.parametrize("transposed", [False, True])
def test_the_general_form(transposed) -> None:
    w = r(4, 6, 3, 3) if transposed else r(6, 4, 3, 3)
    rest = (None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    found = check(aten.convolution.default, r(6, 4, 5, 5), w, *rest)
    assert set(found.factors) == {"b", "j", "k"}


@pytest.mark.parametrize(("transposed", "groups"), [(False, 1), (True, 1), (False, 2)])
def test_the_gradient_of_the_input(transposed, groups) -> None:
    w = r(4, 6, 3, 3) if transposed else r(6, 4 // groups, 3, 3)
    rest = ([6], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, [True, False, False])
    found = check(aten.convolution_backward.default, r(6, 6, 5, 5), r(6, 4, 5, 5), w, *rest)
    assert set(found.factors) == ({"b", "k"} if groups == 1 else {"b"})


def test_an_image_without_batch() -> None:
    found = check(aten.conv2d.default, r(4, 6, 5), r(6, 4, 3, 3))
    assert set(found.factors) == {"j", "k", "s"}


def test_a_bias_keeps_the_input_channels_whole() -> None:
    found = check(aten.conv2d.default, r(6, 4, 5, 5), r(6, 4, 3, 3), r(6))
    assert set(found.factors) == {"b", "j"}
    assert found.inputs[2] == ("j",)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_depthwise_convolution_shares_its_channels(multiplier) -> None:
    w = r(6 * multiplier, 1, 3, 3)
    found = check(aten.conv2d.default, r(4, 6, 5, 5), w, None, [1, 1], [1, 1], [1, 1], 6)
    assert set(found.factors) >= {"b", "g"}
    assert found.capacity["g"] == 6


def test_a_grouped_convolution_is_cut_between_groups() -> None:
    found = check(aten.conv1d.default, r(2, 8, 5), r(4, 4, 3), r(4), groups=2)
    assert found.capacity["g"] == 2
    check(aten.conv_transpose2d.input, r(2, 8, 4, 4), r(8, 3, 2, 2), groups=4)
    rest = (None, [1], [0], [1], False, [0], 4)
    check(aten.convolution.default, r(2, 8, 5), r(4, 2, 3), *rest)

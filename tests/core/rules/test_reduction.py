"""Rules of reductions, scans and sorts, cut in every way."""

from __future__ import annotations

import pytest
import torch
from torch import rand, randn

from core.rules.oracle import check

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("target", [aten.sum, aten.mean])
def test_sums_and_means_may_be_cut_where_they_reduce(target) -> None:
    everything = check(target.default, randn(4, 6))
    assert str(everything) == "b s -> ()"
    assert everything.reduced == {"b", "s"}
    some = target.dim_IntList if target is aten.sum else target.dim
    found = check(some, randn(4, 6, 12), [0, -1])
    assert str(found) == "b s t -> s"
    assert found.reduced == {"b", "t"}
    assert str(check(some, randn(4, 6), [1], True)) == "b s -> b _"
    assert str(check(some, randn(4, 6), None)) == "b s -> ()"


def test_sums_of_truth_values_count() -> None:
    found = check(aten.sum.default, torch.tensor([True, False, True, True]))
    assert found.factors == ("b",)
    check(aten.count_nonzero.default, torch.tensor([[1, 0], [2, 3]]))


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (aten.median.dim, (1,), "b _ -> b, b"),
        (aten.linalg_vector_norm.default, (0, [1]), "b _ -> b"),
    ],
)
def test_other_reductions_keep_whole_what_they_reduce(target, arguments, text) -> None:
    assert str(check(target, rand(4, 6), *arguments)) == text


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (aten.sort.default, (), "b _ -> b _, b _"),
        (aten.sort.stable, (0,), "_ s -> _ s, _ s"),
        (aten.argsort.default, (0,), "_ s -> _ s"),
    ],
)
def test_dimensions_along_which_elements_move_stay_whole(target, arguments, text) -> None:
    x = rand(4, 6)
    if target is aten.sort.stable:
        found = check(target, x, stable=True, dim=arguments[0])
    else:
        found = check(target, x, *arguments)
    assert str(found) == text


def test_numbers_are_reduced_to_themselves() -> None:
    assert str(check(aten.sum.default, rand(()))) == "() -> ()"
    assert str(check(aten.amax.default, rand(()))) == "() -> ()"


def test_vectors_of_a_cross_product_stay_whole() -> None:
    assert str(check(aten.linalg_cross.default, randn(4, 3), randn(1, 3))) == "b _, _ _ -> b _"


def test_a_histogram_of_parts_needs_bounds() -> None:
    bounded = check(aten.histc.default, rand(12) * 4, 4, 0, 4)
    assert bounded.reduced == {"b"} and bounded.factors == ("b",)
    assert not check(aten.histc.default, rand(12), 4).factors


def test_what_does_not_turn_may_be_cut() -> None:
    assert check(aten.rot90.default, randn(4, 6, 2), 1, [1, 2]).factors == ("b",)


def test_slices_that_are_scaled_each_by_its_norm_may_be_cut() -> None:
    assert check(aten.renorm.default, randn(4, 6, 2), 2, 1, 1.5).factors == ("s",)

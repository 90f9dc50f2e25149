"""Rules of views, cut in every way."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import randn

from core.rules.oracle import check
from shardwright.core.rules.views import reshape_segments

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("source", "target", "text", "capacity"),
    [
        ((4, 6, 8), (24, 8), "b _ s -> b s", {"b": 4, "s": 8}),
        ((24, 8), (4, 6, 8), "b s -> b _ s", {"b": 4, "s": 8}),
        ((2, 6, 8), (2, 6, 4, 2), "b s t -> b s t _", {"b": 2, "s": 6, "t": 4}),
        ((6, 4), (4, 6), "b _ -> b _", {"b": 2}),
        ((4, 1, 6), (1, 4, 6, 1), "b _ s -> _ b s _", {"b": 4, "s": 6}),
        ((3, 4), (4, 3), "_ _ -> _ _", {}),
        ((12,), (12,), "b -> b", {"b": 12}),
        ((1, 1), (), "_ _ -> ()", {}),
        ((8, 4), (2, 4, 4), "b s -> b _ s", {"b": 2, "s": 4}),
    ],
)
def test_the_leading_dimensions_of_a_segment_may_be_cut(source, target, text, capacity) -> None:
    found = check(aten.view.default, randn(source), list(target))
    assert str(found) == text
    assert dict(found.capacity) == capacity


def test_a_view_of_nothing_is_not_cut() -> None:
    assert reshape_segments((0, 4), (2, 0)) == ((None, None), (None, None), {})


@st.composite
def shapes(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same number of elements: the same primes, grouped in two ways."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 1]), min_size=1, max_size=6))

    def grouped() -> tuple[int, ...]:
        order = draw(st.permutations(primes))
        cuts = sorted(draw(st.sets(st.integers(0, len(primes)), max_size=4)))
        bounds = [0, *cuts, len(primes)]
        return tuple(prod(order[a:b]) for a, b in pairwise(bounds))

    return grouped(), grouped()


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_random_reshapes(pair) -> None:
    source, target = pair
    check(aten.reshape.default, torch.randn(source, dtype=torch.float64), list(target))


def test_reshapes_that_name_dimensions() -> None:
    found = check(aten.flatten.using_ints, randn(2, 4, 6), 1)
    assert str(found) == "b s _ -> b s"
    assert str(check(aten.unflatten.int, randn(2, 12), 1, [4, 3])) == "b s -> b s _"
    assert str(check(aten.view_as.default, randn(4, 6), randn(4, 2, 3))) == "b s, b s _ -> b s _"


def test_a_dimension_cut_down_to_one_is_not_squeezed() -> None:
    assert str(check(aten.squeeze.default, randn(2, 1, 4))) == "b _ s -> b s"
    assert str(check(aten.squeeze.dim, randn(2, 4), 0)) == "b s -> b s"
    assert str(check(aten.squeeze.dims, randn(1, 4), [0, 1])) == "_ b -> b"
    assert str(check(aten.unsqueeze.default, randn(2, 4), 1)) == "b s -> b _ s"


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (aten.permute.default, ([2, 0, 1],), "b s t -> t b s"),
        (aten.transpose.int, (-1, 0), "b s t -> t s b"),
        (aten.movedim.int, (0, 2), "b s t -> s t b"),
        (aten.mT.default, (), "b s t -> b t s"),
    ],
)
def test_permuted_dimensions_take_their_factors_along(target, arguments, text) -> None:
    assert str(check(target, randn(2, 4, 6), *arguments)) == text


def test_a_transposed_matrix() -> None:
    assert str(check(aten.t.default, randn(4, 6))) == "b s -> s b"


def test_an_expanded_dimension_may_be_cut_in_the_result() -> None:
    found = check(aten.expand.default, randn(2, 1, 6), [4, 2, 12, 6])
    assert str(found) == "s _ u -> b s t u"
    assert str(check(aten.expand_as.default, randn(1, 6), randn(4, 6))) == "_ s, b s -> b s"
    assert str(check(aten.broadcast_to.default, randn(6), [4, 6])) == "s -> b s"


def test_repetitions_are_divided_among_shards() -> None:
    found = check(aten.repeat.default, randn(4, 6), [2, 1, 4])
    assert str(found) == "s _ -> b s t"
    assert found.capacity["t"] == 4
    assert str(check(aten.tile.default, randn(4, 6), [2])) == "b _ -> b s"
    assert str(check(aten.tile.default, randn(6), [4, 1])) == "s -> b s"


def test_interleaved_repetitions_are_cut_as_their_source() -> None:
    found = check(aten.repeat_interleave.self_int, randn(2, 4, 6), 3, 1, output_size=12)
    assert str(found) == "b s t -> b s t"
    assert found.capacity["s"] == 4
    assert not check(aten.repeat_interleave.self_int, randn(2, 4), 3).factors


def test_unequal_repetitions_keep_whole_what_they_repeat() -> None:
    counts = torch.tensor([1, 0, 3, 2])
    found = check(aten.repeat_interleave.self_Tensor, randn(2, 4, 6), counts, 1, output_size=6)
    assert str(found) == "b _ t, _ -> b _ t"
    assert not check(aten.repeat_interleave.self_Tensor, randn(4, 1), counts).factors


def test_views_along_two_dimensions() -> None:
    assert str(check(aten.diagonal.default, randn(2, 4, 4), 0, 1, 2)) == "b _ _ -> b _"


def test_triangles_are_cut_at_the_diagonal_of_the_matrix() -> None:
    assert str(check(aten.tril.default, randn(2, 4, 6))) == "b s t -> b s t"
    assert str(check(aten.tril.default, randn(6, 4), -2)) == "b s -> b s"
    assert str(check(aten.triu.default, randn(4, 4), 1)) == "b s -> b s"


def test_complex_numbers_are_whole_pairs() -> None:
    assert str(check(aten.view_as_complex.default, randn(4, 2))) == "b _ -> b"
    assert str(check(aten.view_as_real.default, torch.view_as_complex(randn(4, 2)))) == "b -> b _"
    assert str(check(aten.resolve_conj.default, torch.view_as_complex(randn(4, 2)))) == "b -> b"


def test_a_dimension_of_one_is_broadcast_to_none() -> None:
    assert str(check(aten.expand.default, randn(4, 1), [4, 0])) == "b _ -> b s"
    assert str(check(aten.add.Tensor, randn(4, 1), randn(4, 0))) == "b _, b s -> b s"


def test_broadcast_tensors_are_expanded_in_parts() -> None:
    found = check(aten.broadcast_tensors.default, [randn(4, 1), randn(6)])
    assert str(found) == "b _, s -> b s, b s"


def test_what_is_not_put_on_a_diagonal_may_be_cut() -> None:
    embed = torch.ops.aten.diag_embed.default
    assert check(embed, randn(4, 6, 3)).factors == ("b", "s")
    assert check(embed, randn(4, 6, 3), 1, 0, 2).factors == ("s", "u")
    write = torch.ops.aten.diagonal_scatter.default
    assert check(write, randn(4, 6, 3, 3), randn(6, 3, 3), 0, 0, 2).factors == ("s", "u")

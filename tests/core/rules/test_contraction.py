"""Rules of matrix products, cut in every way."""

from __future__ import annotations

import pytest
import torch
from torch import randn

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import MainFactors

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("float64")


def test_linear_is_a_main_operator_with_rows_columns_and_a_sum() -> None:
    found = check(aten.linear.default, randn(4, 6, 12), randn(8, 12))
    assert str(found) == "b s k, j k -> b s j"
    assert found.main == MainFactors({"b": "I", "s": "I", "j": "J", "k": "K"}, 1, (("j", "k"),))
    assert found.reduced == {"k"}


def test_linear_with_bias_does_not_cut_what_it_sums_over() -> None:
    found = check(aten.linear.default, randn(6, 12), randn(8, 12), randn(8))
    assert str(found) == "b k, j k, j -> b j"
    assert found.factors == ("b", "j")
    assert found.main is not None and found.main.exclusive == ()


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ((4,), (4,), "k, k -> ()"),
        ((4, 6), (6,), "b k, k -> b"),
        ((4,), (4, 6), "k, k j -> j"),
        ((4, 6), (6, 2), "b k, k j -> b j"),
        ((2, 4, 6), (6, 2), "b s k, k j -> b s j"),
        ((2, 4, 6), (6,), "b s k, k -> b s"),
        ((4,), (2, 4, 6), "k, b k j -> b j"),
        ((2, 4), (6, 4, 2), "i k, b k j -> b i j"),
        ((2, 4, 6), (2, 6, 4), "b i k, b k j -> b i j"),
        ((2, 1, 4, 2), (6, 2, 3), "b _ i k, s k j -> b s i j"),
        ((1, 4, 2), (2, 6, 2, 4), "_ i k, b s k j -> b s i j"),
    ],
)
def test_matmul_for_every_rank(left, right, text) -> None:
    found = check(aten.matmul.default, randn(left), randn(right))
    assert str(found) == text
    assert found.reduced == {"k"}


def test_only_a_matrix_or_vector_is_a_weight() -> None:
    weight = rule_of(op_of(aten.matmul.default, randn(2, 4, 6), randn(6, 2)))
    batched = rule_of(op_of(aten.matmul.default, randn(2, 4, 6), randn(2, 6, 2)))
    assert weight is not None and weight.main is not None and weight.main.weight == 1
    assert batched is not None and batched.main is not None and batched.main.weight is None
    assert list(batched.main.labels.items()) == [("b", "B"), ("i", "I"), ("j", "J"), ("k", "K")]


def test_products_of_fixed_rank() -> None:
    assert str(check(aten.mm.default, randn(4, 6), randn(6, 2))) == "b k, k j -> b j"
    assert str(check(aten.bmm.default, randn(2, 4, 6), randn(2, 6, 2))) == "b i k, b k j -> b i j"
    assert str(check(aten.mv.default, randn(4, 6), randn(6))) == "b k, k -> b"
    assert str(check(aten.dot.default, randn(4), randn(4))) == "k, k -> ()"
    assert str(check(aten.outer.default, randn(4), randn(6))) == "i, j -> i j"


def test_what_is_added_to_a_product_keeps_its_sum_whole() -> None:
    found = check(aten.addmm.default, randn(6), randn(4, 12), randn(12, 6), alpha=2)
    assert str(found) == "j, i k, k j -> i j"
    assert found.factors == ("j", "i")
    assert found.main is not None and found.main.weight == 2
    check(aten.addmm.default, randn(4, 1), randn(4, 12), randn(12, 6))
    check(aten.addmv.default, randn(4), randn(4, 12), randn(12))
    check(aten.baddbmm.default, randn(2, 1, 6), randn(2, 4, 12), randn(2, 12, 6))


@pytest.mark.parametrize(
    ("equation", "shapes", "text"),
    [
        ("bhid,bhjd->bhij", [(2, 4, 6, 2), (2, 4, 2, 2)], "b h i d, b h j d -> b h i j"),
        ("bsd, dhk -> bshk", [(2, 4, 6), (6, 2, 2)], "b s d, d h k -> b s h k"),
        ("ij,jk", [(4, 6), (6, 2)], "i j, j k -> i k"),
        ("...d,de->...e", [(2, 4, 6), (6, 2)], "B S d, d e -> B S e"),
        ("ij,j->", [(4, 6), (6,)], "i j, j -> ()"),
        ("ij->ji", [(4, 6)], "i j -> j i"),
        ("i,j,k->ijk", [(2,), (4,), (2,)], "i, j, k -> i j k"),
    ],
)
def test_einsum_is_read_off_its_equation(equation, shapes, text) -> None:
    found = check(aten.einsum.default, equation, [randn(shape) for shape in shapes])
    assert str(found) == text
    assert (found.main is not None) == (len(shapes) == 2)


def test_einsum_keeps_diagonals_whole() -> None:
    assert str(check(aten.einsum.default, "bii->bi", [randn(2, 4, 4)])) == "b _ _ -> b _"
    product = check(aten.einsum.default, "bii,bij->bj", [randn(2, 4, 4), randn(2, 4, 6)])
    assert str(product) == "b _ _, b _ j -> b j"


def test_paired_dimensions_are_summed() -> None:
    inner = check(aten.inner.default, randn(4, 6), randn(2, 6))
    assert inner.main is not None and inner.main.labels == {"b": "I", "t": "J", "s": "K"}
    dot = check(aten.tensordot.default, randn(2, 4, 6), randn(6, 2, 4), [2, 1], [0, 2])
    assert str(dot) == "b s t, t v s -> b v"


def test_rows_of_groups_may_be_cut_within_a_group() -> None:
    pytest.importorskip("transformers.integrations.moe")
    ends = torch.tensor([3, 3, 7, 12])
    target = torch.ops.transformers.grouped_mm_fallback.default
    found = check(target, randn(12, 4), randn(4, 4, 6), ends)
    assert str(found) == "b k, _ k j, _ -> b j"
    assert found.main is not None and found.main.labels == {"b": "I", "j": "J", "k": "K"}


def test_products_that_are_added_to_something_are_cut_in_rows_and_columns() -> None:
    batch = randn(3, 6, 2), randn(3, 2, 4)
    assert set(check(aten.addbmm.default, randn(6, 4), *batch).factors) == {"i", "j"}
    assert set(check(aten.addbmm.default, randn(4), *batch).factors) == {"i", "j"}
    assert set(check(aten.addr.default, randn(6, 4), randn(6), randn(4)).factors) == {"i", "j"}


@pytest.mark.parametrize("bias", [None, randn(4)])
def test_rows_and_columns_of_a_bilinear_layer_may_be_cut(bias) -> None:
    bias = bias if bias is None else bias.double()
    found = check(aten.bilinear.default, randn(2, 6, 3), randn(2, 6, 5), randn(4, 3, 5), bias)
    assert set(found.factors) == {"b", "s", "j"}


def test_a_product_of_vectors_that_may_be_complex_is_a_sum() -> None:
    assert check(aten.vdot.default, randn(6), randn(6)).reduced == {"k"}

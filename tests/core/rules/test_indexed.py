"""Operators that index a sharded dimension: each device reads or writes its own block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import randint, randn, tensor
from torch.utils import _pytree as pytree

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import LocalSharding

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("float64")


def test_negative_indices_count_from_the_end_of_all_shards() -> None:
    check(aten.index.Tensor, randn(6, 4), [tensor([0, -1, -6])])
    check(aten.index.Tensor, randn(4, 6), [None, randint(-6, 6, (2, 2))])
    check(aten.index_put.default, randn(6, 4), [tensor([0, -1, 0])], randn(3, 4), True)


def as_double(value: Any) -> Any:
    """Parameters of tests are drawn before the default dtype is set."""
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, value
    )


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_values_for_other_shards_are_dropped(reduce) -> None:
    x, index, source = randn(4, 6), randint(0, 6, (4, 6)), randn(4, 6)
    rows = "_" if reduce == "mean" else "e"
    found = check(aten.scatter_reduce.two, x, 1, index, source, reduce)
    assert str(found) == f"b v, b {rows}, b {rows} -> b v"


@pytest.mark.parametrize(
    ("rule", "target", "arguments"),
    [
        ("v s, e, e s -> v s", aten.index_add.default, (0, randint(0, 4, (12,)), randn(12, 6))),
        ("b v, e, b e -> b v", aten.index_add.default, (1, randint(0, 6, (12,)), randn(4, 12))),
        ("v s, e s, e s -> v s", aten.scatter_add.default, (0, randint(0, 4, (8, 6)), randn(8, 6))),
        (
            "b s, t, t s -> b s",
            aten.index_put.default,
            ([randint(-4, 4, (12,))], randn(12, 6), True),
        ),
        (
            "b s, t, _ s -> b s",
            aten.index_put.default,
            ([randint(-4, 4, (12,))], randn(1, 6), True),
        ),
        (
            "b _, t u, u, t u -> b _",
            aten.index_put.default,
            ([randint(0, 4, (4, 2)), randint(0, 6, (2,))], randn(4, 2), True),
        ),
    ],
)
def test_rows_that_are_added_may_be_sharded(rule, target, arguments) -> None:
    """The first input is in the sum of the shards once, in both directions."""
    assert str(check(target, randn(4, 6), *as_double(arguments))) == rule


def test_rows_that_count_only_where_none_is_added_are_full() -> None:
    x, index, source = randn(4, 6), randint(0, 6, (4, 6)), randn(4, 6)
    arguments = (1, index, source, "sum")
    found = check(aten.scatter_reduce.two, x, *arguments, include_self=False)
    assert str(found) == "b v, b _, b _ -> b v"


def test_only_the_first_elements_of_a_longer_source_are_added() -> None:
    source = torch.nn.Buffer(randn(14, 6))
    found = check(aten.scatter_add.default, randn(4, 6), 0, randint(0, 4, (12, 6)), source)
    assert str(found) == "v s, _ s, _ s -> v s"


def test_rows_that_are_written_twice_are_added() -> None:
    check(aten.index_add.default, randn(4, 6), 0, tensor([2, 0, 2]), randn(3, 6))
    check(aten.index_copy.default, randn(4, 6), 1, tensor([5, 0]), randn(4, 2))
    several = [tensor([0, 2]), tensor([0, 3])]
    assert (
        str(check(aten.index_put.default, randn(6, 4), several, randn(2))) == "b _, _, _, _ -> b _"
    )


def test_truth_values_are_read_from_a_full_dimension() -> None:
    found = check(aten.gather.default, randn(4, 6) > 0, 1, randint(0, 6, (4, 2)))
    assert str(found) == "b _, b s -> b s"
    integers = check(aten.index_select.default, randint(9, (4, 6)), 1, tensor([5, 0]))
    assert str(integers) == "b v, s -> b s"


@pytest.mark.parametrize("block", [0, 1])
def test_an_index_out_of_range_is_an_error_on_every_device(block) -> None:
    x, valid, invalid = randn(2, 6), tensor([[5, 0]]), tensor([[6, 0]])
    for target, arguments in (
        (aten.gather.default, lambda index: (1, index)),
        (aten.scatter.value, lambda index: (1, index, 1.0)),
        (aten.index.Tensor, lambda index: ([None, index],)),
    ):
        op = op_of(target, x, *arguments(valid))
        found = rule_of(op)
        assert found is not None and found.kernel is not None
        factor = found.inputs[0][1]
        counts = {each: 2 if each == factor else 1 for each in found.factors}
        kernel = found.kernel(op, LocalSharding(counts, lambda _: block, ((2, 3),)))
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            kernel(x[:, :3], *arguments(invalid))

"""Looking up rules, their notation, and what they say about layouts."""

from __future__ import annotations

import time

import pytest
import torch

from core.rules.oracle import op_of
from shardwright.core.graph.graph import Op, Value
from shardwright.core.layout.layout import Layout
from shardwright.core.rules import rule_of
from shardwright.core.rules.notation import from_notation
from shardwright.core.rules.rule import rule_for

aten = torch.ops.aten


def value(*shape: int, dtype: torch.dtype = torch.float32) -> Value:
    return Value("v", shape, dtype)


def linear(rows: int = 4, columns: int = 8) -> Op:
    x, weight = value(rows, 6), value(columns, 6)
    return Op("op", aten.linear.default, (x, weight), {}, (value(rows, columns),))


def test_an_operator_without_a_rule_has_none() -> None:
    assert rule_of(op_of(aten.nonzero.default, torch.ones(3))) is None
    assert rule_of(Op("op", torch.sort, (value(3),), {}, (value(3), value(3)))) is None


def test_equal_operators_share_one_rule() -> None:
    assert rule_of(linear()) is rule_of(linear())
    assert rule_of(linear()) is not rule_of(linear(rows=2))
    clamp = [Op("c", aten.clamp.default, (value(2), n), {}, (value(2),)) for n in (0.0, 0.0, 1.0)]
    assert rule_of(clamp[0]) is rule_of(clamp[1])
    assert rule_of(clamp[0]) is not rule_of(clamp[2])


def test_many_equal_operators_cost_little() -> None:
    ops = [linear(columns=8 * (1 + i % 20)) for i in range(4000)]
    rule_of(linear())
    started = time.process_time()
    for op in ops:
        rule_of(op)
    assert time.process_time() - started < 1.5


def test_cut_factors_shard_what_carries_them_and_leave_sums_elsewhere() -> None:
    found = rule_of(linear())
    assert found is not None
    mesh = Layout((2, 2), ("a", "b"))
    (x, weight), (y,) = found.layouts(mesh, {"b": (0,), "k": (1,)})
    assert x.axes == ((0,), (1,)) and not x.varying
    assert weight.axes == ((), (1,)) and weight.varying == {0}
    assert y.axes == ((0,), ()) and y.partial == {1}
    assert found.shard_counts(mesh, {"b": (0, 1)}) == {"b": 4, "k": 1, "j": 1}


def test_notation_names_leading_dimensions_from_the_right() -> None:
    op = Op("op", aten.add.Tensor, (value(2, 3, 4), value(3, 1)), {}, (value(2, 3, 4),))
    assert str(from_notation("..., ... -> ...", op)) == "b s t, s _ -> b s t"
    assert str(from_notation("b . _, _ _ -> b _ _", op)) == "b _ _, _ _ -> b _ _"


@pytest.mark.parametrize(
    ("notation", "complaint"),
    [
        ("b k -> b j", "but the operator has 2 and 1"),
        ("b k, k k j -> b j", "has 2 dimensions, but"),
        ("b k, b k -> b k", "but another tensor has another size"),
        ("... b k j, j k -> b j", "names 3 dimensions, but the tensor has only 2"),
    ],
)
def test_notation_that_does_not_fit_is_refused(notation, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        from_notation(notation, linear())


def test_an_operator_has_one_rule() -> None:
    with pytest.raises(
        ValueError, match=r"aten\.linear\.default` already has a sharding rule, built by `linear`"
    ):
        rule_for(aten.linear.default)(lambda op: None)

"""Rules of operators that join, split or slice a sharded dimension, cut in every way."""

from __future__ import annotations

import pytest
import torch
from torch import randn, tensor

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import ShardingRule

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("float64")


def joined(*sizes: int) -> ShardingRule:
    return check(aten.cat.default, [randn(2, size) for size in sizes], 1)


def test_pieces_and_what_they_make_are_sharded_alike() -> None:
    assert str(joined(4, 12, 8)) == "b s, b s, b s -> b s"
    assert str(check(aten.cat.default, [tensor([[1], [2]]), randn(4, 1)])) == "b s, b s -> b s"


def test_the_number_of_shards_divides_every_piece() -> None:
    assert joined(4, 12, 8).capacity["s"] == 4
    assert str(joined(4, 3)) == "b _, b _ -> b _"


def test_an_empty_vector_keeps_the_joined_dimension_whole() -> None:
    assert str(check(aten.cat.default, [randn(0), randn(4, 6)])) == "_, _ s -> _ s"


@pytest.mark.parametrize(
    ("target", "arguments", "shards"),
    [
        (aten.split.Tensor, (4, 1), 4),
        (aten.split_with_sizes.default, ([6, 2, 4], 1), 2),
        (aten.split.sizes, ([9, 3], -1), 3),
        (aten.chunk.default, (3, -1), 4),
        (aten.tensor_split.sections, (2, 1), 6),
        (aten.glu.default, (1,), 6),
        (aten.slice.Tensor, (1, 4, 8), 4),
        (aten.slice.Tensor, (1, 6, 9223372036854775807), 6),
        (aten.slice.Tensor, (1, 0, -2), 2),
    ],
)
def test_a_dimension_and_its_pieces_are_sharded_alike(target, arguments, shards: int) -> None:
    rule = check(target, randn(2, 12), *arguments)
    assert rule.capacity["s"] == shards


def test_devices_send_as_many_rows_as_they_have_at_most() -> None:
    op = op_of(aten.chunk.default, randn(2, 24), 3, 1)
    rule = rule_of(op)
    assert rule is not None
    (move,) = rule.reductions(op, {"b": 2, "s": 4})
    assert move.shape == (1, 6)
    assert move.collective == move.backward_collective == "all_to_all_v"


def test_a_shard_that_sends_equally_much_to_all_uses_an_ordinary_all_to_all() -> None:
    op = op_of(aten.chunk.default, randn(8, 2), 2, 0)
    rule = rule_of(op)
    assert rule is not None
    (move,) = rule.reductions(op, {"b": 2})
    assert move.collective == move.backward_collective == "all_to_all"


def test_many_small_pieces_keep_a_dimension_whole() -> None:
    assert str(check(aten.slice.Tensor, randn(600, 2), 0, 2, 600)) == "_ s -> _ s"

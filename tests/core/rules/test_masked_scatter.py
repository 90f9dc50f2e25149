"""Features of images that replace tokens: the batch is sharded, the features are not."""

from __future__ import annotations

import pytest
import torch
from torch import rand, randn, tensor

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import LocalSharding

masked_scatter = torch.ops.aten.masked_scatter.default

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(6, 4), (6, 1)])
def test_shards_of_the_batch_write_the_elements_that_follow_those_of_earlier_shards(
    share: float, shape: tuple[int, ...]
) -> None:
    found = check(masked_scatter, randn(6, 4), rand(shape) < share, randn(5, 6))
    assert str(found) == "b _, b _, _ _ -> b _"


def test_places_may_be_distributed_unevenly() -> None:
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[1], mask[5, 2:] = True, True
    check(masked_scatter, randn(6, 4), mask, randn(6))


@pytest.mark.parametrize("shard", [0, 1])
def test_too_few_elements_are_an_error_on_all_shards(shard: int) -> None:
    x, mask = randn(3, 4), torch.tensor([True, False, False])[:, None].expand(3, 4)
    op = op_of(masked_scatter, randn(6, 4), mask.repeat(2, 1), randn(8))
    rule = rule_of(op)
    assert rule is not None and rule.kernel is not None
    local = LocalSharding({"b": 2}, lambda _: shard, ((3, 4),), (lambda _: tensor([4, 4]),))
    kernel = rule.kernel(op, local)
    kernel(x, mask, randn(8))
    with pytest.raises(IndexError):
        kernel(x, mask, randn(7))


def test_a_mask_of_all_samples_shards_nothing() -> None:
    assert rule_of(op_of(masked_scatter, randn(6, 4), rand(4) < 0.5, randn(24))) is None

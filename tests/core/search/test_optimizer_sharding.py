"""Which dimension and which axes shard a parameter that is used whole."""

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.fold_axes import split_axes


class Shapes(nn.Module):
    """Parameters of given shapes, all read whole."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part.sum()
        return x.sum()


def stored(
    shapes: list[tuple[int, ...]], devices: int, **options: int
) -> list[tuple[tuple[int, ...], ...]]:
    """The axes of each dimension, where each axis has one prime number of devices."""
    net, sharding = Shapes(*shapes), OptimizerParallel(**{"threshold": 0, **options})
    plan = sw.plan(net, (torch.ones(24),), devices=devices, mode="data_parallel", hsdp=sharding)
    _, decisions = split_axes(plan.mesh, plan.decisions)
    return [decisions.storage[f"parts.{index}"] for index in range(len(shapes))]


def test_the_first_dimension_that_divides_is_sharded() -> None:
    shapes = [(8, 8), (6, 8), (3, 5), (4, 3)]
    assert stored(shapes, 8) == [((0, 1, 2), ()), ((), (0, 1, 2)), ((), ()), ((1, 2), ())]


def test_a_smaller_size_shards_over_the_innermost_axes() -> None:
    assert stored([(8, 8)], 8, shard_size=4) == [((1, 2), ())]
    assert stored([(8, 8)], 8, shard_size=1) == [((), ())]
    assert stored([(9, 4)], 12, shard_size=3) == [((2,), ())]


def test_where_the_size_does_not_divide_fewer_devices_share() -> None:
    assert stored([(6, 3)], 8, shard_size=4) == [((2,), ())]


def test_a_size_that_no_axes_have_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(sw.StrategyError) as error:
        stored([(24, 8)], 12, shard_size=5)
    assert "shard_size=5: parameter 'parts.0' is replicated over 12 devices" in str(error.value)
    assert "use one of -1, 1, 2, 3, 4, 6, 12" in str(error.value)


def test_more_shards_than_replicas_are_refused() -> None:
    net, y = nn.Linear(16, 16), torch.ones(8, 16)
    options = {"mode": "data_parallel", "hsdp": {"shard_size": 4, "threshold": 0}}
    loss, args = sw.WithLoss(net, nn.MSELoss()), (y, y)
    assert sw.plan(loss, args, devices=4, **options).sharding is not None
    with pytest.raises(sw.StrategyError, match="is replicated over more than 2 devices"):
        sw.plan(loss, args, devices=4, stages=2, micro_batches=2, **options)
    # Also where each stage is one device, so that nothing is replicated.
    with pytest.raises(sw.StrategyError, match="shard_size=4, but the plan is for 2 devices"):
        sw.plan(loss, args, devices=2, stages=2, micro_batches=2, **options)

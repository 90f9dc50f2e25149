"""Which dimension and which axes shard a parameter that is used whole."""

import pytest
import torch
from torch import Tensor, nn

import sample_models as models
import shardwright as sw
from shardwright.core.partition.decisions import OptimizerParallel, Storage
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


def test_the_threshold_counts_bytes_of_the_whole_parameter() -> None:
    assert stored([(16, 16), (16, 15)], 2, threshold=1) == [((0,), ()), ((), ())]


def test_a_dimension_that_tensor_parallel_cuts_is_avoided_else_shared() -> None:
    net, args, kwargs = models.llama(layers=1)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            sw.shard(module, ((2, 1, 1), (2, 1)))
    sharding = OptimizerParallel(threshold=0)
    plan = sw.plan(net, args, kwargs, devices=4, mode="sharding_propagation", hsdp=sharding)
    used = sw.plan(net, args, kwargs, devices=4, mode="sharding_propagation").storage
    name = "model.layers.0.mlp.up_proj.weight"
    (tensor,), (data,) = used[name][0], plan.storage[name][1]
    assert plan.storage[name] == ((tensor,), (data,))
    assert {tensor, data} == {0, 1}
    assert sw.check(net, args, kwargs, plan).passes(1e-9)


def test_what_the_user_said_stays_and_frozen_parameters_are_sharded_too() -> None:
    net, args, _ = models.mlp()
    sw.shard(net, parameter_plan={"layers.0.weight": (1, 1)})
    net.get_parameter("layers.1.weight").requires_grad_(False)
    plan = sw.plan(net, args, devices=4, mode="semi_auto", hsdp={"threshold": 0})
    storage: Storage = plan.storage
    assert storage["layers.0.weight"] == ((), ())
    assert storage["layers.1.weight"] == ((0,), ()) and plan.mesh.sizes == "fsdp 4"
    assert sw.check(net, args, None, plan).passes(1e-9)

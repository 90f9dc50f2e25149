"""How inputs arrive: whole, along the batch, or as a tuple of entries says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.constraints import sharded_input_axes
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.errors import StrategyError

MESH = prime_mesh(8)
LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


GRAPH = sw.capture(TwoInputs(), (torch.randn(16, 8), torch.randn(16, 4)))


def test_a_full_batch_arrives_whole() -> None:
    assert sharded_input_axes(GRAPH, MESH, "full_batch") == {}


def test_data_parallel_gives_each_device_its_part_of_every_input() -> None:
    assert sharded_input_axes(GRAPH, MESH, "data_parallel") == {
        "x": ((0, 1, 2), ()),
        "y": ((0, 1, 2), ()),
    }


def test_counts_take_the_outermost_axes() -> None:
    assert sharded_input_axes(GRAPH, MESH, ((2, 1), (1, 1))) == {"x": ((0,), ())}


def test_layouts_name_the_axes_and_none_is_whole() -> None:
    assert sharded_input_axes(GRAPH, MESH, (LAYOUT("mp", ("sp", "dp")), None)) == {
        "x": ((2,), (1, 0))
    }


def test_names_shard_over_axes_with_sizes_and_skip_others() -> None:
    named = ({"dp": 0, "mp": -1}, {"absent": 0})
    assert sharded_input_axes(GRAPH, MESH, named, LAYOUT) == {"x": ((0,), (2,))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "strategies name the axes 'bp', whose sizes are unknown"),
        ({"axes": {"dp": 8}}, "name the axes 'bp', .* but no strategy names 'dp'"),
        ({"axes": {"bp": 8}}, r"input x: \{bp: 2\} shards dimension 2 of a tensor with 2"),
    ],
)
def test_names_without_an_axis_or_dimension_are_one_error(
    options: dict[str, Any], message: str
) -> None:
    batch = torch.randn(16, 8), torch.randn(16, 4)
    named = ({"bp": 2}, None)
    with pytest.raises(StrategyError, match=message):
        sw.plan(TwoInputs(), batch, devices=8, dataset_strategy=named, **options)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("half", "use 'full_batch'"),
        (((2, 1),), r"1 entries, but the model has 2 tensor inputs: x\[16, 8\], y\[16, 4\]"),
        (((3, 1), None), "dimension 0 has size 16, which is not divisible into 3 shards"),
        (((2, 8), None), r"\(2,8\) cannot be distributed over 8 devices"),
        ([(2, 1), None], "must be a tuple"),
        (None, "must be a tuple"),
    ],
)
def test_what_cannot_be_is_one_clear_error(said: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        sharded_input_axes(GRAPH, MESH, said)


def test_a_batch_that_the_devices_do_not_divide_is_refused() -> None:
    with pytest.raises(
        StrategyError, match="use a multiple of 6, or dataset_strategy 'full_batch'"
    ):
        sharded_input_axes(GRAPH, prime_mesh(6), "data_parallel")


@pytest.mark.parametrize(
    ("said", "axes"),
    [
        ("data_parallel", None),
        (((2, 1), (1, 1)), None),
        ((LAYOUT("mp", "sp"), None), None),
        (({"mp": 0}, {"mp": 0}), LAYOUT),
    ],
)
def test_plans_for_inputs_that_arrive_cut_give_the_result_of_one_device(
    said: Any, axes: Layout | None
) -> None:
    net = TwoInputs()
    batch = (torch.randn(16, 8), torch.randn(16, 4))
    plan = sw.plan(net, batch, devices=8, dataset_strategy=said, axes=axes)
    assert plan.arrivals
    assert sw.check(net, batch, {}, plan).passes()

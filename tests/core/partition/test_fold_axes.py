"""Axes that all decisions treat alike become one, and nothing else changes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import shardwright as sw
from random_plans import check_random_plan, random_plan_on
from sample_models import captured, encoder
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.decisions import CutAxes, Decisions
from shardwright.core.partition.fold_axes import fold_axes, split_axes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan.build import make_plan
from shardwright.core.rules.rule import Cuts

MATRICES = [(4, 2), (2, 4), (6, 2), (2, 6)]


@cache
def linear() -> Graph:
    """x [256, 64] times weight [64, 64]."""
    return sw.capture(nn.Linear(64, 64, bias=False), (torch.randn(256, 64),))


def folded(storage: CutAxes, cuts: Cuts, devices: int) -> Partitioned:
    decisions = Decisions({"linear": cuts}, {"weight": storage})
    return fold_axes(Partitioned(linear(), prime_mesh(devices), decisions))


def test_data_and_tensor_parallel_need_two_axes() -> None:
    rows, features = (0, 1, 2, 3), (4, 5, 6)
    result = folded((features, ()), {"b": rows, "j": features}, 128)
    assert result.mesh == Layout((16, 8), ("dp", "tp"))
    assert result.decisions.cuts == {"linear": {"b": (0,), "j": (1,)}}
    assert result.decisions.storage == {"weight": ((1,), ())}
    apart = split_axes(result.mesh, result.decisions)
    assert apart[0] == prime_mesh(128)
    assert apart[1].cuts == {"linear": {"b": rows, "j": features}}
    assert apart[1].storage == {"weight": (features, ())}


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        (((0, 1, 2), ()), (8,)),
        (((0, 1), ()), (4, 2)),
        (((), (1, 0, 2)), (2, 2, 2)),
        (((0,), (1, 2)), (2, 4)),
        (((0, 2), ()), (2, 2, 2)),
        (((), ()), (8,)),
    ],
)
def test_axes_are_joined_where_they_are_side_by_side_in_order(
    storage: CutAxes, expected: tuple[int, ...]
) -> None:
    assert folded(storage, {"b": (0, 1, 2)}, 8).mesh.device_matrix == expected


def test_axes_that_are_to_stay_apart_are_not_joined() -> None:
    plan = folded(((), ()), {"b": (0, 1, 2, 3)}, 16)
    assert plan.mesh.device_matrix == (16,)
    mesh, decisions = split_axes(plan.mesh, plan.decisions)
    two = Layout((4, 4), ("outer", "inner"))
    assert fold_axes(Partitioned(plan.graph, mesh, decisions), unjoined_mesh=two).mesh == two


@pytest.mark.parametrize("matrix", MATRICES)
def test_plans_send_the_same_on_folded_axes(matrix: tuple[int, ...]) -> None:
    graph = captured(encoder, batch=12, sequence=12, width=24)
    for seed in range(3):
        plan = random_plan_on(Layout(matrix, ("a", "b")), graph, seed)
        primes = Partitioned(graph, *split_axes(plan.mesh, plan.decisions))
        assert fold_axes(primes).step_bytes == primes.step_bytes


@pytest.mark.parametrize("devices", [8, 12, 24])
def test_plans_are_folded_and_what_runs_is_what_was_planned(devices: int) -> None:
    graph = captured(encoder, batch=96, sequence=48, width=96)
    plan = sw.plan(graph, devices=devices, cluster="ascend910b")
    assert plan.graph is not None and plan.step is not None
    assert len(plan.mesh.device_matrix) < len(prime_mesh(devices).device_matrix)
    assert plan.partition(plan.graph) is plan.partitioned
    assert max(plan.partitioned.step_bytes) == (plan.forward_bytes, plan.backward_bytes)
    # A folded axis has the links of all that it is made of.
    again = predict(plan.partitioned, load_cluster("ascend910b"))
    assert again.seconds == pytest.approx(plan.step.seconds, rel=1e-9)


@pytest.mark.parametrize("matrix", MATRICES)
def test_programs_on_folded_axes_compute_as_one_device(matrix: tuple[int, ...]) -> None:
    sizes = {"batch": 12, "sequence": 12, "width": 24}
    (net, args, kwargs), graph = encoder(**sizes), captured(encoder, **sizes)
    plan = random_plan_on(Layout(matrix, ("a", "b")), graph, seed=1)
    check_random_plan(net, args, kwargs, graph, plan)


def test_a_file_with_prime_axes_is_read_and_what_runs_is_folded() -> None:
    net, args, kwargs = encoder(batch=8, sequence=8, width=16)
    plan = sw.plan(net, args, kwargs, devices=8, mode="data_parallel")
    graph = plan.graph
    assert graph is not None and plan.mesh.sizes == "dp 8"
    primes = Partitioned(graph, *split_axes(plan.mesh, plan.decisions))
    earlier = make_plan(primes, mode="data_parallel", options={}, search_seconds=0.0, training=True)
    read = sw.Plan.from_json(earlier.to_json())
    assert str(read).startswith("Plan for 8 devices: a 2, b 2, c 2\n")
    assert read.partition(graph).mesh == plan.mesh
    assert read.partition(graph).decisions == plan.decisions
    assert sw.check(net, args, kwargs, read).passes(1e-9)

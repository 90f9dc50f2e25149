"""The lower bound: below every plan, and near the best."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from core.search.toy import CLUSTERS, TOY, random_layout, searcher
from random_cases import random_cases
from random_graphs import random_net
from sample_models import captured, llama, mlp
from shardwright.core.capture.capture import capture
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.partition.decisions import Decisions
from shardwright.core.search.by_time.axis_counts import CountedRedistributionBound, group_axes
from shardwright.core.search.by_time.certificate import certify, gap_of
from shardwright.core.search.by_time.exact import _JointTables
from shardwright.core.search.by_time.problem import search_problem
from shardwright.core.search.by_time.redistribution_bound import RedistributionBound
from shardwright.core.search.by_time.search import cuts_of_graph
from shardwright.core.search.request import SearchRequest, TimedStep


@pytest.mark.parametrize("cluster", CLUSTERS, ids=["trees", "rings", "gloo"])
@pytest.mark.parametrize("devices", [8, 12])
def test_no_redistribution_takes_less_than_the_least_seconds(
    cluster: Cluster, devices: int
) -> None:
    mesh, draw = prime_mesh(devices), random.Random(devices)
    graph = captured(mlp, sizes=(16, 32))
    value = replace(graph.parameters[0], shape=(24, 24, 24))
    model = TimeModel(cluster, mesh)
    axis_groups = group_axes(model.links)
    least = CountedRedistributionBound(model.links, axis_groups)
    for _ in range(40):
        left, read = random_layout(mesh, draw, True), random_layout(mesh, draw, False)
        for differentiable in (True, False):
            path = redistribution_steps(left, read, value.shape, differentiable)
            seconds = sum(sum(model.step_seconds(step, value, differentiable)) for step in path)
            counts = [
                np.array([[[len(set(k.axes) & set(each)) for k in axis_groups] for each in axes]])
                for axes in ((*left.axes, left.partial), (*read.axes, read.varying))
            ]
            bound = least.between(*counts, value.numel * value.itemsize, differentiable)
            assert bound[0, 0] <= seconds * (1 + 1e-5), (left, read, path)


@pytest.mark.parametrize(
    ("sizes", "batch", "devices"), [((16, 32), 4, 4), ((8, 24, 6), 12, 3), ((4, 64), 2, 4)]
)
@pytest.mark.parametrize("cluster", CLUSTERS[:2], ids=["trees", "rings"])
def test_no_combination_of_cuts_is_below_the_bound(
    sizes: tuple[int, ...], batch: int, devices: int, cluster: Cluster
) -> None:
    graph, mesh = captured(mlp, sizes=sizes, batch=batch), prime_mesh(devices)
    search = searcher(graph, mesh, cluster)
    states = _JointTables(search.problem, search.model, search.objective).all_cuts
    costs = [search.total(search.objective.cost(list(cuts))) for cuts in product(*states)]
    best = list(product(*states))[costs.index(min(costs))]
    request = SearchRequest(graph, mesh, timed_step=TimedStep(cluster))
    found = certify(request, cuts_of_graph(graph, search.problem, best))
    assert found.cost == pytest.approx(min(costs))
    assert 0.5 * found.cost < found.bound <= min(costs)
    # Whatever plan it starts from.
    assert certify(request, {}).bound <= min(costs)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_blocks_that_repeat_prove_no_more_as_one_than_one_by_one(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    graph, mesh = captured(llama, width=64, vocabulary=256, sequence=32, layers=6), prime_mesh(2)
    request = SearchRequest(graph, mesh, timed_step=TimedStep(TOY, micro_batches=micro_batches))
    search = searcher(graph, mesh, TOY)
    plan = cuts_of_graph(graph, search.problem, search.best())
    apart = certify(request, plan)
    monkeypatch.setattr("shardwright.core.search.by_time.certificate.MAX_UNFOLDED_VARIABLES", 0)
    folded = certify(request, plan)
    assert len(search_problem(graph, {}).variables) < len(search.problem.variable_of)
    assert folded.bound <= apart.cost
    assert folded.bound == pytest.approx(apart.bound, rel=0.1)


def test_the_gap_of_a_plan_does_not_depend_on_how_its_axes_are_folded() -> None:
    graph = captured(mlp, sizes=(16, 32), batch=8)
    assert fold_gap(graph, prime_mesh(8), ((0, 1, 2),)) == pytest.approx(
        fold_gap(graph, Layout((8,), ("dp",)), ((0,),))
    )


def fold_gap(graph: Graph, mesh: Layout, axes: tuple[tuple[int, ...], ...]) -> float | None:
    cuts = {op.name: {"b": axes[0]} for op in graph.ops if op.name}
    return gap_of(graph, mesh, Decisions(cuts, {}), TimedStep(TOY), 0.1)


@random_cases(6)
def test_no_random_plan_of_a_random_model_is_below_the_bound(seed: int) -> None:
    net, args = random_net(seed)
    graph, mesh = capture(net, args), prime_mesh(4)
    search = searcher(graph, mesh, TOY, fold=False)
    states = _JointTables(search.problem, search.model, search.objective).all_cuts
    best = search.best()
    request = SearchRequest(graph, mesh, timed_step=TimedStep(TOY))
    found = certify(request, cuts_of_graph(graph, search.problem, best))
    assert found.bound > 0.3 * found.cost
    draw = random.Random(seed)
    for _ in range(60):  # Near the best, where a bound that is none would show.
        cuts = [
            draw.choice(ways) if draw.random() < 0.1 else chosen
            for ways, chosen in zip(states, best, strict=True)
        ]
        assert found.bound <= search.total(search.objective.cost(cuts))


@pytest.mark.parametrize("devices", [2, 8, 12])
def test_sums_of_few_numbers_on_a_shared_processor_take_no_less_than_the_least_seconds(
    devices: int,
) -> None:
    gloo = CLUSTERS[2]
    model = TimeModel(
        replace(gloo, device=replace(gloo.device, at_full_rate=1)), prime_mesh(devices)
    )
    mesh, axis_groups = model.mesh, group_axes(model.links)
    few, many = (
        CountedRedistributionBound(model.links, axis_groups),
        RedistributionBound(model.links),
    )
    axes = range(len(mesh.device_matrix))
    whole = TensorLayout(mesh, ((),))
    for summed in (each for n in axes for each in combinations(axes, n + 1)):
        left = TensorLayout(mesh, ((),), frozenset(summed))
        for numbers, differentiable in product((1, devices, devices**2, 10**6), (True, False)):
            (step,) = redistribution_steps(left, whole, (numbers,), differentiable)
            value = replace(captured(mlp, sizes=(16, 32)).parameters[0], shape=(numbers,))
            seconds = sum(model.step_seconds(step, value, differentiable))
            counts = [
                np.array([[[len(set(k.axes) & set(each)) for k in axis_groups] for each in places]])
                for places in (((), left.partial), ((), ()))
            ]
            bound = few.between(*counts, 4 * numbers, differentiable)
            assert bound[0, 0] <= seconds * (1 + 1e-5)
            assert many.seconds(left, whole, 4 * numbers, differentiable) <= seconds * (1 + 1e-9)

"""The search by seconds: its tables against the whole, and what it decides."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from core.search.toy import TOY, searcher
from sample_models import bert, captured, encoder, gpt2, llama, mlp, resnet
from shardwright.core.cost.cluster import Cluster, Device, LinkLevel
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.step_time import StepTime, step_time
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import communication, default_storage
from shardwright.core.partition.decisions import Decisions, OptimizerParallel
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.baselines import data_parallel
from shardwright.core.search.by_time.axis_tables import AxisTables
from shardwright.core.search.by_time.elimination import minimum
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost
from shardwright.core.search.by_time.problem import search_problem
from shardwright.core.search.by_time.search import candidates_by_time, cuts_of_graph
from shardwright.core.search.optimizer_sharding import sharded_storage
from shardwright.core.search.request import CutsOfGraph, SearchRequest, TimedStep
from shardwright.errors import ConfigError, StrategyError


@pytest.fixture(scope="module")
def language_model() -> Graph:
    """Two layers of LLaMA 2 7B."""
    return captured(
        llama, batch=8, sequence=2048, heads=32, kv_heads=32, width=4096, vocabulary=32000
    )


def by_time(graph: Graph, mesh: Layout, cluster: Cluster, **others: Any) -> CutsOfGraph:
    return candidates_by_time(SearchRequest(graph, mesh, timed_step=TimedStep(cluster), **others))[
        0
    ]


def timed(graph: Graph, mesh: Layout, cuts: dict[str, Cuts], cluster: Cluster) -> StepTime:
    flow = communication(graph, mesh, Decisions(cuts, default_storage(graph, mesh, cuts)))
    return step_time(graph, flow, cuts, TimeModel(cluster, mesh))


MODELS = [mlp, resnet, encoder, llama, gpt2, bert]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_the_tables_of_one_axis_add_up_to_the_cost_of_the_whole(model: Any) -> None:
    search = searcher(captured(model), prime_mesh(2), TOY)
    choices = search._pinned_choices()
    axis = AxisTables(search.problem, search.model, 0, choices, search.weights(0.0), {})
    sizes, factors = axis._build_tables()
    found = minimum(sizes, factors)
    for row, options, choice in zip(choices, axis.options, found.choices, strict=False):
        row[0] = options[choice]
    cost = search._compute_cost_of_choices(choices)
    whole = cost.forward + cost.backward + cost.redistributions + cost.update
    whole += search.seconds_per_parameter_byte * cost.parameter_bytes
    if model in (gpt2, bert):
        # Of a weight that two operators read the tables count the best storage.
        assert 0.95 * whole < found.cost <= whole
    else:
        assert found.cost == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_what_the_search_counts_is_what_the_step_is_predicted_to_take(model: Any) -> None:
    graph = captured(model)
    mesh = prime_mesh(8)
    search = searcher(graph, mesh, TOY)
    cuts = search.best()
    cost = search.objective.cost(cuts)
    time = timed(graph, mesh, cuts_of_graph(graph, search.problem, cuts), TOY)
    assert cost.forward == pytest.approx(time.forward)
    assert cost.backward == pytest.approx(time.backward)
    assert cost.update == pytest.approx(time.update)
    assert cost.redistributions == pytest.approx(
        time.forward_redistributions + time.backward_redistributions, rel=1e-6
    )


def test_on_one_axis_no_combination_of_choices_is_better() -> None:
    graph = captured(mlp, sizes=(16, 32, 8))
    mesh = prime_mesh(2)
    search = searcher(graph, mesh, TOY)
    variables = search.problem.variables
    options = [
        [{}]
        + [
            {f: (0,)}
            for f, limit in zip(n.op_type.factors, n.op_type.limits, strict=True)
            if limit % 2 == 0
        ]
        for n in variables
    ]
    objective = Objective(search.problem, search.model)
    least = min(search.total(objective.cost(list(cuts))) for cuts in product(*options))
    assert search.total(search.objective.cost(search.best())) == pytest.approx(least)


def test_folded_blocks_cost_what_they_cost_one_by_one() -> None:
    graph = captured(llama, layers=5)
    mesh = prime_mesh(4)
    folded, whole = (searcher(graph, mesh, TOY, fold) for fold in (True, False))
    assert len(folded.problem.variables) < 0.9 * len(whole.problem.variables)
    cuts = folded.best()
    unfolded = [cuts[node] for node in folded.problem.variable_of]
    alike, each = folded.objective.cost(cuts), whole.objective.cost(unfolded)
    assert folded.total(alike) == pytest.approx(whole.total(each))
    assert folded.total(alike) <= whole.total(whole.objective.cost(whole.best())) * 1.01


def test_depth_adds_nothing_to_decide() -> None:
    counts = {
        len(search_problem(captured(llama, layers=layers), {}).variables) for layers in (6, 9)
    }
    assert len(counts) == 1


def test_a_small_mem_coeff_gives_data_parallel_a_large_one_tensor_parallel(
    language_model: Graph,
) -> None:
    mesh, cluster = prime_mesh(8), load_cluster("ascend910b")
    found = {
        mem_coeff: candidates_by_time(
            SearchRequest(
                language_model,
                mesh,
                timed_step=TimedStep(cluster, optimizer_shard_size=-1),
                mem_coeff=mem_coeff,
            )
        )[0]
        for mem_coeff in (0.01, 1000.0)
    }
    names = [f"model.layers.1.{name}" for name in ("self_attn.q_proj", "mlp.down_proj")]
    everything = (0, 1, 2)
    assert [found[0.01][name] for name in names] == [{"b": everything}] * 2
    up, down = (found[1000.0][f"model.layers.1.mlp.{name}_proj"] for name in ("up", "down"))
    assert up == {"j": everything}
    assert set(down) <= {"j", "k"}


def test_the_plan_is_never_slower_than_data_parallel(language_model: Graph) -> None:
    for name in ("h100", "ascend910b"):
        cluster, mesh = load_cluster(name), prime_mesh(8)
        cuts = by_time(language_model, mesh, cluster, mem_coeff=0.01)
        ours = timed(language_model, mesh, cuts, cluster).seconds
        assert (
            ours
            <= timed(language_model, mesh, data_parallel(language_model, mesh), cluster).seconds
        )


def test_where_gradients_take_longer_than_the_backward_pass_they_count(
    language_model: Graph,
) -> None:
    slow = Cluster("slow", load_cluster("h100").device, (LinkLevel("network", 1e9, 1e-5),))
    mesh = prime_mesh(8)
    cuts = by_time(language_model, mesh, slow, mem_coeff=0.1)
    parallel = timed(language_model, mesh, data_parallel(language_model, mesh), slow)
    assert parallel.exposed > 0.5 * parallel.seconds
    assert timed(language_model, mesh, cuts, slow).seconds < 0.9 * parallel.seconds


def test_pinned_operators_are_kept_and_neighbors_follow(language_model: Graph) -> None:
    pinned: dict[str, Cuts] = {"model.layers.1.mlp.up_proj": {"j": (2, 1), "b": (0,)}}
    device = Device(
        64 * 10**9,
        {"bfloat16": 313e12, "float16": 313e12, "float32": 75e12},
        1.6e12,
        matrix_efficiency=0.65,
        memory_efficiency=0.8,
        overhead=6e-6,
    )
    cluster = Cluster("ideal", device, (LinkLevel("mesh", 196e9, 5e-6),))
    cuts = by_time(language_model, prime_mesh(8), cluster, pinned=pinned)
    assert cuts["model.layers.1.mlp.up_proj"] == {"j": (2, 1), "b": (0,)}
    assert cuts["model.layers.1.mlp.gate_proj"] == {"j": (1, 2), "b": (0,)}
    assert cuts["model.layers.1.mlp.act_fn"] == {"t": (1, 2), "b": (0,)}


def test_the_same_plan_is_found_again() -> None:
    graph, mesh = captured(gpt2), Layout((2, 3), ("a", "b"))
    plans = [by_time(graph, mesh, TOY) for _ in range(2)]
    assert plans[0] == plans[1]


def test_inputs_that_arrive_cut_stay_so() -> None:
    graph = captured(mlp, batch=8)
    arrivals = {value.name: ((0,), ()) for value in graph.input_values}
    cuts = by_time(graph, prime_mesh(2), TOY, mem_coeff=1e-9, arrivals=arrivals)
    decisions = Decisions(cuts, default_storage(graph, prime_mesh(2), cuts), arrivals=arrivals)
    flow = communication(graph, prime_mesh(2), decisions)
    assert not any(t.value in graph.input_values for t in flow.transfers)


def test_a_cluster_with_too_few_devices_and_a_request_without_one_are_refused() -> None:
    graph = captured(mlp)
    small = Cluster("small", TOY.device, (LinkLevel("node", 1e8, 1e-5, devices=4),))
    with pytest.raises(ConfigError, match="has 4 devices, but 8 were requested"):
        by_time(graph, prime_mesh(8), small)
    with pytest.raises(StrategyError, match="needs a cluster: the request has no cluster"):
        candidates_by_time(SearchRequest(graph, prime_mesh(8)))


def test_parameters_that_are_stored_sharded_are_gathered_where_devices_use_them_alike() -> None:
    graph, mesh = captured(mlp), prime_mesh(4)
    sharding = OptimizerParallel("level1", threshold=0)
    every = search_problem(graph, {}, fold=False)
    model = TimeModel(TOY, mesh, optimizer_shard_size=sharding.shard_size)
    half = {name: {f: axes[:1] for f, axes in cut.items()} for name, cut in _along(graph).items()}
    for cuts in (_along(graph), half):
        storage = sharded_storage(graph, mesh, cuts, default_storage(graph, mesh, cuts), sharding)
        flow = communication(graph, mesh, Decisions(cuts, storage, sharding=sharding))
        time = step_time(graph, flow, cuts, model)
        cost = Objective(every, model).cost(
            [cuts.get(node.op.name, {}) for node in every.variables]
        )
        # A bucket pays its latency besides.
        assert 0.5 * time.gathers < cost.gathers < time.gathers, cuts
        assert cost.update == pytest.approx(time.update)


def _along(graph: Graph) -> dict[str, Cuts]:
    return data_parallel(graph, prime_mesh(4))


def test_what_is_gathered_hides_behind_the_forward_pass_and_gradients_behind_the_backward() -> None:
    cost = ObjectiveCost(forward=1.0, backward=2.0, gathers=1.5, gradients=2.25, update=0.5)
    assert cost.exposed == 0.5 + 0.25
    assert cost.total(4, 0.0) == 4 * 3.0 + 0.75 + 0.5
    assert cost.total(4, 0.0, slowdown=1.0) == 4 * 3.0 + 3.75 + 0.5
    assert cost.total(4, 0.0, slowdown=0.5) == 4 * 3.0 + (0.75 + 3.75) / 2 + 0.5


def test_a_search_reports_growing_shares_that_end_at_the_whole(language_model: Graph) -> None:
    shares: list[float] = []
    cluster = load_cluster("h100")
    by_time(language_model, prime_mesh(64), cluster, on_share=shares.append)
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == 1.0
    assert len(set(shares)) > 20


def test_searches_of_one_graph_share_the_problem_as_long_as_nothing_is_pinned_otherwise() -> None:
    graph = captured(llama, layers=2)
    problem = search_problem(graph, {})
    assert search_problem(graph, {}) is problem
    name = graph.ops[0].name
    pinned = search_problem(graph, {name: {}})
    assert pinned is not problem
    assert [variable.op.name for variable in pinned.variables if variable.pinned == {}] == [name]
    assert search_problem(graph, {}).variables[0].pinned is None

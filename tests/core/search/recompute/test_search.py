"""Recomputation that makes plans fit: within the limit, cheaper for larger limits, and right."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial

import torch
import transformers

import shardwright as sw
from sample_models import llama
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.flops import work_of
from shardwright.core.cost.memory import Memory, memory
from shardwright.core.cost.memory_bounds import memory_lower_bounds
from shardwright.core.graph.graph import Graph
from shardwright.core.partition.communication import communication
from shardwright.core.partition.decisions import Decisions, OptimizerParallel, Recompute
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.search.recompute.blocks import RecomputeBlocks, RecomputeCosts
from shardwright.core.search.recompute.levels import RecomputeLevels
from shardwright.core.search.recompute.search import (
    MeasuredDecisions,
    MeasureMemory,
    RecomputeSearch,
    max_peak_ratio,
)
from shardwright.models.expert_sharding import pin_expert

NET, ARGS, KWARGS = llama(layers=3)
GRAPH = sw.capture(NET, ARGS, KWARGS)


def measured(plan: sw.Plan, decisions: Decisions, stages: Container[int] | None = None) -> Memory:
    return memory(Partitioned(GRAPH, plan.mesh, decisions, plan.pipeline), stages=stages)


def fitted(plan: sw.Plan, limit: int) -> MeasuredDecisions:
    return fit_by_recomputation(GRAPH, plan, limit, partial(measured, plan))


def fit_by_recomputation(
    graph: Graph, plan: sw.Plan, limit: int, measure: MeasureMemory
) -> MeasuredDecisions:
    """Decisions that fit into `limit` bytes of a device; else those that need least."""
    plain = MeasuredDecisions(plan.decisions, measure(plan.decisions, None))
    if plain.memory.peak <= limit:
        return plain
    levels = RecomputeLevels(RecomputeBlocks(graph, plan.mesh, plan.decisions), plan.pipeline)
    parts = levels.at_depth(levels.depths[0][0]), plan.decisions, measure, limit
    fit = RecomputeSearch(*parts, memory_lower_bounds(plan.partitioned, "adamw"))
    if fit.can_fit:
        return fit.run()
    return min(plain, fit.fully_recomputed, key=lambda each: each.memory.peak)


def work_again(plan: sw.Plan, decisions: Decisions) -> float:
    """Operations that a device does twice."""
    flow = communication(GRAPH, plan.mesh, decisions)
    return sum(work_of(GRAPH.by_name[name]).forward_flops for s in flow.segments for name in s.ops)


def test_less_memory_takes_more_work() -> None:
    plan = sw.plan(GRAPH, devices=4, mem_coeff=10.0)
    plain = measured(plan, plan.decisions)
    floor = fitted(plan, 1).memory.peak
    assert floor < plain.peak
    work = []
    for share in (1.0, 0.8, 0.2):
        limit = int(floor + share * (plain.peak - floor))
        found = fitted(plan, limit)
        assert found.memory.peak <= limit
        assert found.memory == measured(plan, found.decisions), "what is said is what it needs"
        work.append(work_again(plan, found.decisions))
    assert work[0] == 0 < work[1] < work[2]


def test_what_experts_and_losses_keep_is_estimated_as_a_dry_run_finds_it() -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=4,
        vocab_size=1024,
    )
    with torch.device("meta"):
        net = transformers.Qwen3MoeForCausalLM(config)
        ids = torch.empty(16, 256, dtype=torch.long)
    pin_expert(net, data_parallel=8, model_parallel=1, expert_parallel=4, seq_parallel=False)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = sw.plan(net, (), call, devices=8, mode="sharding_propagation")
    graph = plan.graph
    assert graph is not None
    found = RecomputeBlocks(graph, plan.mesh, plan.decisions)
    kept = memory(plan.partitioned).stages[0].activations
    assert 0.8 < sum(found.saved_without_blocks.values()) / kept < 1.1


def test_a_fitted_plan_computes_the_same() -> None:
    plan = sw.plan(GRAPH, devices=2, mem_coeff=10.0)
    found = replace(plan, recompute=fitted(plan, 1).decisions.recompute)
    assert found.recompute
    result = sw.check(NET, ARGS, KWARGS, found)
    assert result.passes(1e-9), result


def test_layers_are_blocks_and_gathers_make_the_difference_between_ways() -> None:
    plan = sw.plan(GRAPH, devices=4, mem_coeff=10.0)
    found = RecomputeBlocks(GRAPH, plan.mesh, plan.decisions)
    blocks = {block.name: block for block in found.blocks(found.depths()[0][0])}
    assert {"model.layers.0", "model.layers.1"} <= set(blocks)
    options = blocks["model.layers.1"].options
    cheap, kept, again = (
        options[name][0] for name in ("cheap", "block", "block_and_communication")
    )
    assert cheap.freed < kept.freed < again.freed
    assert cheap.cost < kept.cost < again.cost


def test_what_the_user_marked_stays() -> None:
    plan = sw.plan(GRAPH, devices=1)
    said = {"model.layers.0.mlp.act_fn": Recompute("mine", communication=False)}
    marked = replace(plan, recompute=said)
    found = fitted(marked, 1).decisions.recompute
    assert found["model.layers.0.mlp.act_fn"] == said["model.layers.0.mlp.act_fn"]
    assert len(found) > 1


def test_on_slow_links_what_is_sent_again_costs_more() -> None:
    plan = sw.plan(GRAPH, devices=4, mem_coeff=10.0)
    added = []
    for costs in (
        RecomputeCosts.of_cluster(load_cluster("h100"), torch.bfloat16),
        RecomputeCosts(flops_per_sent_byte=1e6),
    ):
        found = RecomputeBlocks(GRAPH, plan.mesh, plan.decisions, costs)
        options = next(
            b for b in found.blocks(found.depths()[0][0]) if b.name == "model.layers.1"
        ).options
        added.append(options["block_and_communication"][0].cost - options["block"][0].cost)
    assert 0 < added[0] < added[1]


def test_layers_are_blocks_where_the_loss_outweighs_all_layers() -> None:
    net, args, kwargs = llama(layers=3, vocabulary=2048)
    graph = sw.capture(net, args, kwargs)
    plan = sw.plan(graph, devices=1)
    found = RecomputeBlocks(graph, plan.mesh, plan.decisions)
    assert {"model.layers.0", "model.layers.1"} <= {
        block.name for block in found.blocks(found.depths()[0][0])
    }


def test_no_more_is_recomputed_than_the_limit_requires() -> None:
    net, args, kwargs = llama(layers=8)
    graph = sw.capture(net, args, kwargs)
    plan = sw.plan(graph, devices=2)

    def needs(decisions: Decisions, stages: Container[int] | None = None) -> Memory:
        return memory(Partitioned(graph, plan.mesh, decisions, plan.pipeline), stages=stages)

    def fit(limit: int) -> int:
        fitted = fit_by_recomputation(graph, plan, limit, needs)
        return fitted.memory.peak

    most, least = needs(plan.decisions).peak, fit(1)
    for share in (0.3, 0.7):
        limit = int(least + share * (most - least))
        assert limit - 0.1 * (most - least) <= fit(limit) <= limit


def test_of_what_cannot_fit_only_the_stage_that_needs_most_is_measured() -> None:
    net, args, kwargs = llama(layers=4)
    plan = sw.plan(net, args, kwargs, devices=4, stages=2, micro_batches=2)
    graph = plan.graph
    assert graph is not None
    asked: list[Container[int] | None] = []

    def needs(decisions: Decisions, stages: Container[int] | None = None) -> Memory:
        asked.append(stages)
        return memory(Partitioned(graph, plan.mesh, decisions, plan.pipeline), stages=stages)

    levels = RecomputeLevels(RecomputeBlocks(graph, plan.mesh, plan.decisions), plan.pipeline)
    parts = levels.at_depth(levels.depths[0][0]), plan.decisions, needs, 1
    fit = RecomputeSearch(*parts, memory_lower_bounds(plan.partitioned, "adamw"))
    assert not fit.can_fit
    assert asked == [{fit.largest_stage.stage}]
    least = fit.fully_recomputed.memory
    assert fit.largest_stage == least.stages[fit.largest_stage.stage]
    assert fit.largest_stage.peak >= 0.95 * least.peak


def test_a_search_with_the_ratio_of_a_similar_plan_expects_more_recomputation() -> None:
    hsdp = OptimizerParallel("level3", threshold=0)
    plan = sw.plan(GRAPH, devices=4, mode="data_parallel", hsdp=hsdp)
    levels = RecomputeLevels(RecomputeBlocks(GRAPH, plan.mesh, plan.decisions), plan.pipeline)
    others = memory_lower_bounds(plan.partitioned, "adamw")

    def search(limit: int) -> RecomputeSearch:
        measure, depth = partial(measured, plan), levels.depths[0][0]
        return RecomputeSearch(levels.at_depth(depth), plan.decisions, measure, limit, others)

    floor, plain = search(1).fully_recomputed.memory.peak, measured(plan, plan.decisions).peak
    for share in (0.1, 0.5):
        limit = int(floor + share * (plain - floor))
        first, second = search(limit), search(limit)
        needed = work_again(plan, first.run().decisions)
        before = work_again(plan, second.expected_decisions())
        assert first.measured_peak_ratio is not None
        second.peak_ratio = first.measured_peak_ratio
        after = work_again(plan, second.expected_decisions())
        assert before < after <= needed


def test_what_another_plan_of_its_kind_needs_makes_an_estimate_enough() -> None:
    plan = sw.plan(GRAPH, devices=4, mem_coeff=10.0)
    asked: list[Decisions] = []

    def needs(decisions: Decisions, stages: Container[int] | None = None) -> Memory:
        asked.append(decisions)
        return measured(plan, decisions, stages)

    levels = RecomputeLevels(RecomputeBlocks(GRAPH, plan.mesh, plan.decisions), plan.pipeline)
    parts = levels.at_depth(levels.depths[0][0]), plan.decisions, needs
    others = memory_lower_bounds(plan.partitioned, "adamw")
    first = RecomputeSearch(*parts, 1, others)
    excess, limit = first.measured_ratio, int(1.1 * first.largest_stage.peak)
    asked.clear()
    second = RecomputeSearch(*parts, limit, others, max_peak_ratio(excess))
    assert second.can_fit and not asked
    assert second.run().memory.peak <= limit
    assert not RecomputeSearch(*parts, limit, others, max_peak_ratio(None)).estimate_fits

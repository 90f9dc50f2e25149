"""Recomputation that makes a plan fit into the memory of its devices, as cheap as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwright.cost.memory import Memory
from shardwright.cost.pipeline_timeline import actions, alive
from shardwright.graph.graph import Graph, Op
from shardwright.layout.layout import Layout
from shardwright.partition.decisions import Decisions, Recompute
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.search.recompute.candidates import (
    DEFAULT_PRICES,
    Candidates,
    RecomputeBlock,
    RecomputePrices,
)
from shardwright.search.recompute.knapsack import KnapsackItem, cheapest

ATTEMPTS = 6
"""How often more is computed again after a rehearsal has shown that it is not enough."""

EVERYTHING = 2**62
"""More bytes than can be freed: all that is possible."""

Measure = Callable[[Decisions], Memory]
"""What every device needs at most under a plan."""


@dataclass(frozen=True)
class Fitted:
    """A plan with what it needs."""

    decisions: Decisions
    memory: Memory


def fit_by_recomputation(
    graph: Graph,
    mesh: Layout,
    decisions: Decisions,
    pipeline: PipelineSpec,
    limit: int,
    measure: Measure,
    worth: RecomputePrices = DEFAULT_PRICES,
) -> Fitted:
    """Computes again in the backward pass what costs least work and frees enough.

    What a choice frees is estimated; each is then rehearsed, and more is freed where that was not
    enough, in the end all that can be. What the user has marked stays as it is.

    Args:
        limit: bytes of a device.
        worth: what bytes count that are moved and sent again.

    Returns:
        What fits; else, of all that was tried, what needs least.
    """
    best = Fitted(decisions, measure(decisions))
    if best.memory.peak <= limit:
        return best
    candidates = Candidates(graph, mesh, decisions, _stages(pipeline), worth)
    flights = _micro_batches(pipeline)
    needed = dict.fromkeys(range(pipeline.stages), 0)
    memory = best.memory
    for attempt in range(ATTEMPTS + 1):
        for stage in memory.stages:
            over = stage.peak - limit
            if over > 0 and attempt == ATTEMPTS:
                needed[stage.stage] = EVERYTHING
            elif over > 0:
                needed[stage.stage] += -(-over // flights[stage.stage])
        marks, more = _chosen(candidates.blocks, needed)
        tried = replace(decisions, recompute={**decisions.recompute, **marks})
        memory = measure(tried)
        if memory.peak < best.memory.peak:
            best = Fitted(tried, memory)
        if memory.peak <= limit or not more:
            break
    return best


def _chosen(
    blocks: tuple[RecomputeBlock, ...], needed: Mapping[int, int]
) -> tuple[dict[str, Recompute], bool]:
    """What is computed again, and whether a stage could free more than that."""
    marks: dict[str, Recompute] = {}
    more = False
    for stage, size in needed.items():
        mine = [block for block in blocks if block.stage == stage]
        options = [[option for option, _ in block.ways.values()] for block in mine]
        found = cheapest(options, size)
        more |= found is not None and size > 0
        if found is None:
            found = [_most(block) for block in options]
        for block, index in zip(mine, found, strict=True):
            if index >= 0:
                marks.update(list(block.ways.values())[index][1])
    return marks, more


def _most(options: list[KnapsackItem]) -> int:
    return max(range(len(options)), key=lambda index: options[index].freed)


def _stages(pipeline: PipelineSpec) -> Callable[[Op], int]:
    return lambda op: pipeline.stage_of(pipeline.chunk_of.get(op.name, 0))


def _micro_batches(pipeline: PipelineSpec) -> list[int]:
    """For each stage how many micro-batches it keeps activations of at most, in one of its parts
    on average."""
    return [
        max(max(1, sum(counts.values()) // len(counts)) for counts in alive(order))
        for order in actions(pipeline)
    ]

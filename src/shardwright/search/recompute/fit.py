"""The cheapest recomputation with which a plan fits into the memory of its devices."""

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
    RecomputeBlock,
    RecomputeCandidates,
    RecomputePrices,
)
from shardwright.search.recompute.knapsack import KnapsackItem, cheapest

ATTEMPTS = 6
"""How often more is recomputed after a dry run has shown that it is not enough."""

EVERYTHING = 2**62
"""More bytes than can be freed: all that is possible."""

Measure = Callable[[Decisions], Memory]
"""What every device needs at most under a plan."""


@dataclass(frozen=True)
class MemoryFit:
    """Decisions and the memory that they need."""

    decisions: Decisions
    memory: Memory


def fit_by_recomputation(
    graph: Graph,
    mesh: Layout,
    decisions: Decisions,
    pipeline: PipelineSpec,
    limit: int,
    measure: Measure,
    prices: RecomputePrices = DEFAULT_PRICES,
) -> MemoryFit:
    """Recomputes in the backward pass what costs least work and frees enough memory.

    What a choice frees is estimated; a dry run then measures it, and more is recomputed where that
    was not enough, in the end all that can be. What the user has marked stays as it is.

    Args:
        limit: bytes of a device.
        measure: what every device needs with certain decisions.
        prices: of bytes that are moved and sent again.

    Returns:
        Decisions that fit; else, of all attempts, those that need least.
    """
    best = MemoryFit(decisions, measure(decisions))
    if best.memory.peak <= limit:
        return best
    candidates = RecomputeCandidates(graph, mesh, decisions, _stages(pipeline), prices)
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
        attempted = replace(decisions, recompute={**decisions.recompute, **marks})
        memory = measure(attempted)
        if memory.peak < best.memory.peak:
            best = MemoryFit(attempted, memory)
        if memory.peak <= limit or not more:
            break
    return best


def _chosen(
    blocks: tuple[RecomputeBlock, ...], needed: Mapping[int, int]
) -> tuple[dict[str, Recompute], bool]:
    """The operators to recompute, and whether a stage could free more than they do."""
    marks: dict[str, Recompute] = {}
    more = False
    for stage, size in needed.items():
        of_stage = [block for block in blocks if block.stage == stage]
        items = [[item for item, _ in block.options.values()] for block in of_stage]
        indices = cheapest(items, size)
        more |= indices is not None and size > 0
        if indices is None:
            indices = [_most(block) for block in items]
        for block, index in zip(of_stage, indices, strict=True):
            if index >= 0:
                marks.update(list(block.options.values())[index][1])
    return marks, more


def _most(items: list[KnapsackItem]) -> int:
    return max(range(len(items)), key=lambda index: items[index].freed)


def _stages(pipeline: PipelineSpec) -> Callable[[Op], int]:
    return lambda op: pipeline.stage_of(pipeline.chunk_of.get(op.name, 0))


def _micro_batches(pipeline: PipelineSpec) -> list[int]:
    """For each stage how many micro-batches it keeps activations of at most, in one of its chunks
    on average."""
    return [
        max(max(1, sum(counts.values()) // len(counts)) for counts in alive(order))
        for order in actions(pipeline)
    ]

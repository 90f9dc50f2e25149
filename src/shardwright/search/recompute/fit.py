"""The cheapest recomputation with which a plan fits into the memory of its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from shardwright.cost.memory import Memory
from shardwright.cost.pipeline_timeline import actions, alive
from shardwright.graph.graph import Graph, Op
from shardwright.layout.layout import Layout
from shardwright.partition.decisions import Decisions, Recompute
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.search.recompute.candidates import (
    DEFAULT_PRICES,
    Marks,
    RecomputeBlock,
    RecomputeCandidates,
    RecomputePrices,
)
from shardwright.search.recompute.knapsack import KnapsackItem, cheapest

ATTEMPTS = 8
"""How often other operators are recomputed after a dry run has shown what those of before free."""

MARGIN = 1.02
"""By how much more is asked than the last attempt lets expect to be needed."""

DEPTHS = 2
"""At so many depths of the module tree blocks are tried if those of the first do not suffice."""

SLACK = 0.02
"""So much of the limit may stay free without a further attempt."""

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

    What a choice frees is estimated, and a dry run measures it. How much the next choice is asked
    to free follows from what was measured: more where a stage needs more than its devices have,
    less where much of that stays free. What the user has marked stays as it is.

    Args:
        limit: bytes of a device.
        measure: what every device needs with certain decisions.
        prices: of bytes that are moved and sent again.

    Returns:
        Decisions that fit; else, of all attempts, those that need least.
    """
    best = plain = MemoryFit(decisions, measure(decisions))
    if plain.memory.peak <= limit:
        return plain
    candidates = RecomputeCandidates(graph, mesh, decisions, _stages(pipeline), prices)
    for blocks in islice(candidates.divisions(), DEPTHS):
        fitted = _fit_blocks(blocks, plain, pipeline, limit, measure)
        if fitted.memory.peak < best.memory.peak:
            best = fitted
        if best.memory.peak <= limit:
            break
    return best


def _fit_blocks(
    blocks: Sequence[RecomputeBlock],
    plain: MemoryFit,
    pipeline: PipelineSpec,
    limit: int,
    measure: Measure,
) -> MemoryFit:
    """Likewise, with certain blocks; `plain` recomputes none of them."""
    stages = [
        _StageFit([b for b in blocks if b.stage == number], limit, flights, {0: stage.peak})
        for number, (stage, flights) in enumerate(
            zip(plain.memory.stages, _micro_batches(pipeline), strict=True)
        )
    ]

    def recomputing(needed: Iterable[int]) -> Decisions:
        chosen = (stage.marks(size) for stage, size in zip(stages, needed, strict=True))
        marks = {name: mark for each in chosen for name, mark in each.items()}
        return replace(plain.decisions, recompute={**plain.decisions.recompute, **marks})

    for attempt in range(1, ATTEMPTS + 1):
        needed = [stage.next_needed(attempt == ATTEMPTS) for stage in stages]
        if all(size in stage.peaks for size, stage in zip(needed, stages, strict=True)):
            break
        measured = measure(recomputing(needed))
        for stage, size, of_stage in zip(stages, needed, measured.stages, strict=True):
            stage.peaks[size] = of_stage.peak
    chosen = recomputing([stage.best for stage in stages])
    return MemoryFit(chosen, measure(chosen))


@dataclass
class _StageFit:
    """What is known of one stage.

    Args:
        blocks: of its operators.
        flights: how many micro-batches keep activations at a time.
        peaks: bytes that a device needs if the blocks are asked to free so many bytes of one
            micro-batch; those are estimates.
    """

    blocks: Sequence[RecomputeBlock]
    limit: int
    flights: int
    peaks: dict[int, int]

    @property
    def best(self) -> int:
        """The least that has fit, or what needed least memory if nothing has."""
        enough = [needed for needed, peak in self.peaks.items() if peak <= self.limit]
        return min(enough) if enough else min(self.peaks, key=lambda needed: self.peaks[needed])

    def next_needed(self, last: bool) -> int:
        """What to ask for; what was asked for before if there is nothing to gain.

        Args:
            last: whether there is no further attempt.
        """
        best, most = self.best, sum(map(_frees, self.blocks))
        fits = self.peaks[best] <= self.limit
        if (fits and (best == 0 or self.peaks[best] >= (1 - SLACK) * self.limit)) or (
            not fits and most in self.peaks
        ):
            return best
        if last:
            return best if fits else most
        few = max(needed for needed in self.peaks if not fits or needed < best)
        over, freed = self.peaks[0] - self.limit, self.peaks[0] - self.peaks[few]
        if few == 0:
            expected = over // self.flights + 1
        else:
            expected = int(MARGIN * few * over / freed) if freed > 0 else most
        upper = best if fits else most
        if few < expected < upper:
            return expected
        return (few + best) // 2 if fits else most

    def marks(self, needed: int) -> Marks:
        """The operators to recompute."""
        items = [[item for item, _ in block.options.values()] for block in self.blocks]
        indices = cheapest(items, needed)
        if indices is None:
            indices = [_most(block) for block in items]
        marks: dict[str, Recompute] = {}
        for block, index in zip(self.blocks, indices, strict=True):
            if index >= 0:
                marks.update(list(block.options.values())[index][1])
        return marks


def _frees(block: RecomputeBlock) -> int:
    return max(item.freed for item, _ in block.options.values())


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

"""The cheapest recomputation with which a plan fits into the memory of its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
from shardwright.search.recompute.knapsack import cheapest

STEPS = 16
"""Of all that a stage can free, shares in steps of one in so many are tried."""

BY_HAND = ("lean", "cheap", "kept", "again")
"""What is tried besides: what is done by hand, in all blocks the same."""

Measure = Callable[[Decisions], Memory]
"""What every device needs at most under a plan."""

Rungs = tuple[int, ...]
"""How much each stage recomputes, as the number of a step of its own."""


@dataclass(frozen=True)
class MemoryFit:
    """Decisions and the memory that they need."""

    decisions: Decisions
    memory: Memory


class StageLadder:
    """More and more that one stage recomputes, in steps that depend on no memory limit.

    Args:
        blocks: of its operators.
        saved: bytes that it keeps for backward passes if it recomputes nothing: an estimate.
        flights: how many micro-batches it keeps them of.
        depth: of the blocks in the module tree.
    """

    def __init__(
        self, blocks: Sequence[RecomputeBlock], saved: int, flights: int, depth: int
    ) -> None:
        self._blocks, self.depth = blocks, depth
        self._items = [[item for item, _ in block.options.values()] for block in blocks]
        self._most = sum(max(item.freed for item in items) for items in self._items)
        self._marks: dict[int, Marks] = {}
        self.kept = flights * saved, flights * (saved - self._most)

    @cached_property
    def _steps(self) -> list[tuple[int, str]]:
        """What each step frees, and how that is done by hand if it is."""
        steps = {self._most * step // STEPS: "" for step in range(STEPS + 1)}
        for way in BY_HAND:
            steps[sum(block.options[way][0].freed for block in self._by_hand(way))] = way
        steps[0] = ""
        return sorted(steps.items())

    @property
    def top(self) -> int:
        """The last step."""
        return len(self._steps) - 1

    def share(self, rung: int) -> float:
        """What a step frees of all that can be freed."""
        return self._steps[rung][0] / max(self._most, 1)

    def above(self, share: float) -> int:
        """The first step that frees so much of all that can be freed."""
        return next((n for n in range(self.top) if self.share(n) >= share), self.top)

    def marks(self, rung: int) -> Marks:
        """The operators that are recomputed."""
        if rung not in self._marks:
            self._marks[rung] = dict(self._chosen(*self._steps[rung]))
        return self._marks[rung]

    def _by_hand(self, way: str) -> list[RecomputeBlock]:
        """The modules that can be recomputed so; what is in none is left as it is."""
        return [block for block in self._blocks if block.name and way in block.options]

    def _chosen(self, needed: int, way: str) -> Iterator[tuple[str, Recompute]]:
        if way:
            for block in self._by_hand(way):
                yield from block.options[way][1].items()
            return
        indices = cheapest(self._items, needed)
        assert indices is not None
        for block, index in zip(self._blocks, indices, strict=True):
            if index >= 0:
                yield from list(block.options.values())[index][1].items()


def stage_ladders(
    graph: Graph,
    mesh: Layout,
    decisions: Decisions,
    pipeline: PipelineSpec,
    prices: RecomputePrices = DEFAULT_PRICES,
    depth: int | None = None,
) -> tuple[StageLadder, ...]:
    """What each stage can recompute; what the user has marked stays as it is.

    Args:
        prices: of bytes that are moved and sent again.
        depth: of the blocks in the module tree; by default the best.
    """

    def stage_of(op: Op) -> int:
        return pipeline.stage_of(pipeline.chunk_of.get(op.name, 0))

    found = RecomputeCandidates(graph, mesh, decisions, stage_of, prices, depth)
    saved = [0] * pipeline.stages
    for name, size in found.plain.items():
        if name in graph.by_name:
            saved[stage_of(graph.by_name[name])] += size
    return tuple(
        StageLadder(
            [each for each in found.blocks if each.stage == number], size, flights, found.depth
        )
        for number, (size, flights) in enumerate(zip(saved, _flights(pipeline), strict=True))
    )


def _flights(pipeline: PipelineSpec) -> list[int]:
    """For each stage how many micro-batches it keeps activations of at most, in one of its chunks
    on average."""
    return [
        max(max(1, sum(counts.values()) // len(counts)) for counts in alive(order))
        for order in actions(pipeline)
    ]


class RecomputeFit:
    """The least that each stage of a plan recomputes so that it fits, found by dry runs.

    Args:
        ladders: of its stages.
        measure: what every device needs with certain decisions.
    """

    def __init__(
        self, ladders: Sequence[StageLadder], plain: Decisions, measure: Measure, limit: int
    ) -> None:
        self._ladders, self._plain, self._measure, self._limit = ladders, plain, measure, limit
        self._peaks: list[dict[int, int]] = [{} for _ in ladders]
        self.least: MemoryFit | None = None

    def begin(self) -> bool:
        """Whether it fits with all recomputed that can be."""
        self._try(tuple(ladder.top for ladder in self._ladders))
        return all(min(peaks.values()) <= self._limit for peaks in self._peaks)

    def expected(self) -> Decisions:
        """What is expected to fit."""
        return self._decided(tuple(map(self._guess, range(len(self._ladders)))))

    def run(self) -> MemoryFit:
        """What fits; for after `begin`."""
        while True:
            rungs = tuple(map(self._guess, range(len(self._ladders))))
            if all(rung in peaks for rung, peaks in zip(rungs, self._peaks, strict=True)):
                decisions = self._decided(rungs)
                return MemoryFit(decisions, self._measure(decisions))
            self._try(rungs)

    def _try(self, rungs: Rungs) -> None:
        decisions = self._decided(rungs)
        needs = self._measure(decisions)
        for rung, peaks, stage in zip(rungs, self._peaks, needs.stages, strict=True):
            peaks[rung] = stage.peak
        if self.least is None or needs.peak < self.least.memory.peak:
            self.least = MemoryFit(decisions, needs)

    def _guess(self, number: int) -> int:
        """What a stage tries next; the least that fits once that is known."""
        ladder, peaks = self._ladders[number], self._peaks[number]
        enough = min(rung for rung, peak in peaks.items() if peak <= self._limit)
        if enough == 0:
            return 0
        few = max((rung for rung in peaks if rung < enough), default=0)
        if few + 1 == enough and few in peaks:
            return enough
        # Between what is known, or what is expected of nothing, it is taken to be linear.
        most = peaks.get(few, peaks[enough] + ladder.kept[0] - ladder.kept[1])
        if most <= peaks[enough]:
            return (few + enough) // 2
        missing = (most - self._limit) / (most - peaks[enough])
        share = ladder.share(few) + missing * (ladder.share(enough) - ladder.share(few))
        return max(few + (few in peaks), min(enough - 1, ladder.above(share)))

    def _decided(self, rungs: Rungs) -> Decisions:
        chosen = (each.marks(rung) for each, rung in zip(self._ladders, rungs, strict=True))
        marks = {name: mark for each in chosen for name, mark in each.items()}
        return replace(self._plain, recompute={**self._plain.recompute, **marks})

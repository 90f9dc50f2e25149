"""The cheapest recomputation with which a plan fits into the memory of its devices."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.core.cost.memory import Memory, StageMemory
from shardwright.core.cost.pipeline_timeline import actions, alive
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.search.recompute.candidates import (
    DEFAULT_PRICES,
    Marks,
    RecomputeBlock,
    RecomputeCandidates,
    RecomputePrices,
)
from shardwright.core.search.recompute.knapsack import cheapest

STEPS = 16
"""Of all that a stage can free, shares in steps of one in so many are tried."""

CERTAIN = 0.93
"""Estimates of what a device needs are up to 7% above what a dry run finds, where that is much."""

SURE = 1.4
"""Estimates of what a device needs are hardly ever more than 40% below what a dry run finds; that
much where gradients of whole parameters are reduced at the end of a step."""

ALIKE = 1.05
"""Of plans of one kind, what a dry run finds is hardly ever so much more of the estimate than what
one has found of another."""

CERTAIN_OF_KEPT = 0.75
"""Likewise of what is kept for backward passes alone, where that is little."""


def surely(excess: float | None) -> float:
    """How many times an estimate a device hardly ever exceeds.

    Args:
        excess: how many times its estimate another plan of the kind needs, if that was measured.
    """
    return SURE if excess is None else min(SURE, ALIKE * excess)


WHOLE = ("kept", "again")
"""Options that recompute all of a block at once."""

BY_HAND = ("lean", "cheap", *WHOLE)
"""What is tried besides: what is done by hand, in all blocks the same."""

Measure = Callable[[Decisions, Container[int] | None], Memory]
"""What every device needs at most under a plan, of some stages or (None) of all."""

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

    Attributes:
        alike: equal for stages whose chunks are, so that what is measured of one is known of all.
    """

    def __init__(self, blocks: Sequence[RecomputeBlock], saved: int, flights: int) -> None:
        self._blocks = blocks
        self._items = [[item for item, _ in block.options.values()] for block in blocks]
        self._most = sum(max(item.freed for item in items) for items in self._items)
        self._marks: dict[int, Marks] = {}
        self.kept = flights * saved, flights * (saved - self._most)
        self._again = max(map(_made_again, blocks), default=0)
        self.alike = saved, tuple(map(tuple, self._items))

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

    def most(self, others: int) -> int:
        """Bytes that the stage needs if it recomputes all that it can: an estimate.

        Args:
            others: bytes that it needs besides.
        """
        return others + self.kept[1] + self._again

    def least(self, others: int, together: bool) -> int:
        """Bytes that the stage hardly ever falls short of, whatever it recomputes: an estimate.

        Args:
            others: bytes that it needs besides.
            together: whether all of them at that time.
        """
        kept = self.most(0)
        return int(max(CERTAIN * (others + kept), others + CERTAIN_OF_KEPT * kept * together))

    def expected(self, others: int, limit: int, certain: float = 1.0) -> int:
        """The step with which the stage fits, by an estimate.

        Args:
            others: bytes that it needs besides.
            certain: the share of the estimate that is needed.
        """
        most, least = self.kept
        missing = certain * (others + most) - limit
        return 0 if missing <= 0 else self.above(min(1.0, missing / max(most - least, 1)))

    def nearby(self, rung: int, missing: int) -> int:
        """The first step that frees so many bytes more than another, by an estimate."""
        most, least = self.kept
        return self.above(self.share(rung) + missing / max(CERTAIN * (most - least), 1))

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


def _made_again(block: RecomputeBlock) -> int:
    """What is there at once when the backward pass of a block begins that is recomputed whole."""
    way, (item, _) = max(block.options.items(), key=lambda option: option[1][0].freed)
    return item.freed if way in WHOLE else 0


class RecomputeLadders:
    """What each stage of a planned model can recompute; what the user has marked stays as it is.

    Args:
        prices: of bytes that are moved and sent again.
        depths: of the module tree, at which blocks may be: some that compete, then others that need
            less; by default those of the candidates.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMatrix,
        decisions: Decisions,
        pipeline: PipelineSpec,
        prices: RecomputePrices = DEFAULT_PRICES,
        depths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._found = RecomputeCandidates(graph, mesh, decisions, self._stage_of, prices)
        self.depths = self._found.depths if depths is None else depths
        self._at: dict[int, tuple[StageLadder, ...]] = {}

    def at(self, depth: int) -> tuple[StageLadder, ...]:
        """For each stage, with blocks at a depth of the module tree."""
        if depth not in self._at:
            blocks, flights = self._found.blocks(depth), _flights(self._pipeline)
            self._at[depth] = tuple(
                StageLadder([each for each in blocks if each.stage == number], *kept)
                for number, kept in enumerate(zip(self._saved, flights, strict=True))
            )
        return self._at[depth]

    def may_fit_plain(self, others: Sequence[int], limit: int) -> bool:
        """Whether by an estimate every stage may fit if nothing is recomputed.

        Args:
            others: bytes that each needs besides.
        """
        kept = zip(others, _flights(self._pipeline), self._saved, strict=True)
        return all(CERTAIN * (size + flights * saved) <= limit for size, flights, saved in kept)

    def least(self, depth: int, others: Sequence[int]) -> list[int]:
        """Bytes that each stage hardly ever falls short of with blocks at a depth of the module
        tree, by an estimate.

        Args:
            others: bytes that each needs besides.
        """
        # From the second micro-batch on there are gradients during all of a backward pass.
        several = self._pipeline.micro_batches > 1
        stages = zip(self.at(depth), others, strict=True)
        return [stage.least(size, several) for stage, size in stages]

    def expected(self, plain: Decisions, others: Sequence[int], limit: int) -> Decisions:
        """The least that is recomputed, by an estimate, if every stage fits: hardly ever more than
        what is."""
        stages = self.at(self.depths[0][0])
        steps = zip(stages, others, strict=True)
        return decided(
            plain, stages, [stage.expected(size, limit, CERTAIN) for stage, size in steps]
        )

    @cached_property
    def _saved(self) -> list[int]:
        """Bytes that each stage keeps if it recomputes nothing."""
        saved = [0] * self._pipeline.stages
        operators = self._found.graph.by_name
        for name, size in self._found.plain.items():
            if name in operators:
                saved[self._stage_of(operators[name])] += size
        return saved

    def _stage_of(self, op: Op) -> int:
        return self._pipeline.stage_of(self._pipeline.chunk_of.get(op.name, 0))


def _flights(pipeline: PipelineSpec) -> list[int]:
    """For each stage how many micro-batches it keeps activations of at most, in one of its chunks
    on average."""
    return [
        max(max(1, sum(counts.values()) // len(counts)) for counts in alive(order))
        for order in actions(pipeline)
    ]


def decided(plain: Decisions, ladders: Sequence[StageLadder], rungs: Sequence[int]) -> Decisions:
    """Decisions by which each stage recomputes the operators of a step of its ladder."""
    chosen = (ladder.marks(rung) for ladder, rung in zip(ladders, rungs, strict=True))
    marks = {name: mark for each in chosen for name, mark in each.items()}
    return replace(plain, recompute={**plain.recompute, **marks})


class RecomputeFit:
    """The least that each stage of a plan recomputes so that it fits, found by dry runs.

    Args:
        ladders: of its stages.
        measure: what devices need with certain decisions.
        others: bytes that each stage needs besides what it keeps for backward passes.
        sure: how many times the estimate is enough to say that it fits with all recomputed that can
            be; if None, no estimate is.

    Attributes:
        is_sure: whether the estimate says so.
    """

    def __init__(
        self,
        ladders: Sequence[StageLadder],
        plain: Decisions,
        measure: Measure,
        limit: int,
        others: Sequence[int],
        sure: float | None = None,
    ) -> None:
        self._ladders, self._plain, self._measure, self._limit = ladders, plain, measure, limit
        self._others = others
        self._most = [ladder.most(size) for ladder, size in zip(ladders, others, strict=True)]
        self.is_sure = sure is not None and sure * max(self._most) <= limit
        self._peaks: list[dict[int, int]] = [{} for _ in ladders]
        self._measured: dict[object, set[int]] = {ladder.alike: set() for ladder in ladders}
        self._least: MemoryFit | None = None

    @property
    def least(self) -> MemoryFit:
        """With all recomputed that can be."""
        if self._least is None:
            self._least = self._try(self._tops)
        return self._least

    @property
    def _tops(self) -> Rungs:
        return tuple(ladder.top for ladder in self._ladders)

    @cached_property
    def largest(self) -> StageMemory:
        """With all recomputed that can be, of the stage that by an estimate needs most then."""
        sizes = [
            ladder.most(size) for ladder, size in zip(self._ladders, self._others, strict=True)
        ]
        number = sizes.index(max(sizes))
        (stage,) = self._measure(self._decided(self._tops), {number}).stages
        return stage

    @property
    def can_fit(self) -> bool:
        """Whether it fits with all recomputed that can be; by an estimate where that is sure. Where
        the stage that needs most does not, others are not measured."""
        fits = self.is_sure or self.largest.peak <= self._limit
        return fits and (self.is_sure or self.least.memory.peak <= self._limit)

    @property
    def is_measured(self) -> bool:
        """Whether it is known what all stages need if all is recomputed that can be."""
        return self._least is not None

    @property
    def excess(self) -> float:
        """How many times its estimate the stage needs that needs most by that, if all is recomputed
        that can be."""
        return self.largest.peak / max(self._most)

    @property
    def outside(self) -> int:
        """Bytes that a device needs outside of forward and backward passes, if that is where it
        needs most with all recomputed that can be: blocks at other depths change nothing of it. Of
        the stages that were measured."""
        stages = self.least.memory.stages if self.is_measured else (self.largest,)
        return max((stage.peak for stage in stages if not stage.in_a_pass), default=0)

    def expected(self) -> Decisions:
        """What is expected to fit."""
        return self._decided(tuple(map(self._guess, range(len(self._ladders)))))

    def run(self) -> MemoryFit:
        """What fits, if it can; else all that can be is recomputed."""
        while True:
            measured = zip(self._tops, self._peaks, strict=True)
            if any(peaks.get(top, 0) > self._limit for top, peaks in measured):
                return self.least
            rungs = tuple(map(self._guess, range(len(self._ladders))))
            if all(rung in peaks for rung, peaks in zip(rungs, self._peaks, strict=True)):
                decisions = self._decided(rungs)
                return MemoryFit(decisions, self._measure(decisions, None))
            self._try(rungs)

    def _try(self, rungs: Rungs) -> MemoryFit:
        decisions = self._decided(rungs)
        needs = self._measure(decisions, None)
        for number, (rung, stage) in enumerate(zip(rungs, needs.stages, strict=True)):
            self._peaks[number][rung] = stage.peak
            self._measured[self._ladders[number].alike].add(rung)
        return MemoryFit(decisions, needs)

    def _guess(self, number: int) -> int:
        """What a stage tries next; the least that fits once that is known."""
        ladder, peaks = self._ladders[number], self._peaks[number]
        enough = min((n for n, peak in peaks.items() if peak <= self._limit), default=ladder.top)
        few = max((rung for rung in peaks if rung < enough), default=-1)
        between = range(few + 1, enough)
        if not between:
            return enough
        # Where a stage recomputes most its peak may be elsewhere, and says nothing of other steps.
        if few >= 0 or enough < ladder.top:
            nearest = min(peaks, key=lambda rung: abs(peaks[rung] - self._limit))
            guess = ladder.nearby(nearest, peaks[nearest] - self._limit)
        else:
            guess = ladder.expected(self._others[number], self._limit)
        # What was measured of a stage like this one is next to nothing to measure.
        known = self._measured[ladder.alike].intersection(between)
        return min(known or between, key=lambda rung: (abs(rung - guess), rung))

    def _decided(self, rungs: Rungs) -> Decisions:
        return decided(self._plain, self._ladders, rungs)

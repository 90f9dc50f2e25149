"""The fastest candidate that fits into the memory of its devices."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, zip_longest

import torch

from shardwright.cost.memory import Memory, StageMemory, binary, least_memory
from shardwright.cost.pipeline_timeline import check_pipelining
from shardwright.errors import MemoryLimitError, PlanError, ShardwrightError, StrategyError
from shardwright.partition.communication import storage_as_used
from shardwright.partition.decisions import LEVELS, OptimizerParallel
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.planner.candidate import Candidate, Decide
from shardwright.planner.options import AUTO_RECOMPUTE, PlanOptions
from shardwright.rules.rule import Cuts
from shardwright.search.recompute.candidates import DEFAULT_PRICES, RecomputePrices
from shardwright.search.recompute.fit import MemoryFit, RecomputeFit, RecomputeLadders

log = logging.getLogger("shardwright.search")

FACTOR, LARGEST_MEM_COEFF = 8.0, 1e4
"""By what `mem_coeff` grows from one attempt to the next, and how far."""

NEAR = 0.97
"""A larger `mem_coeff` may have a step that is predicted to take so much of that of a smaller one:
what the search weighs is simpler than the prediction."""


@dataclass(frozen=True)
class Attempt:
    """What is tried.

    Args:
        recompute: whether further operators may be computed again.
    """

    options: PlanOptions
    recompute: bool

    def __str__(self) -> str:
        return self.options.in_words(self.recompute)


Groups = Sequence[Sequence[Attempt]]
"""What competes, a group after the other: a later one is hardly ever faster."""


@dataclass(frozen=True)
class Way:
    """Options that are tried, and then further ones.

    Args:
        options: with a number of stages and a schedule.
        bound: seconds; a step takes at least so long.
    """

    options: PlanOptions
    bound: float = 0.0


def within_memory(options: PlanOptions, decide: Decide) -> Candidate:
    """The candidate that `options` request if it fits into their memory limit, else the first that
    does after these changes, each on top of those before: parameters and optimizer state are stored
    sharded (`level1` to `level3`), operators are computed again, `mem_coeff` grows, there are more
    stages. With `recompute="auto"`, operators are computed again first. On a cluster the number of
    stages stays, and of all levels of sharding and `mem_coeff`, each with as much computed again as
    it needs, the fastest that fits is taken, so that less memory is never faster. With
    `mem_coeff="auto"` it is the smallest with which the plan fits without other changes; where
    there is none, the changes begin with the smallest.

    Raises:
        MemoryLimitError: if none fits; says the smallest limit that would do.
    """
    candidate = fastest_within_memory([Way(options)], decide)
    assert candidate is not None
    return candidate


def fastest_within_memory(
    ways: Sequence[Way], decide: Decide, below: float = float("inf")
) -> Candidate | None:
    """Of several ways that differ in their stages the fastest that fits; None if what fits takes
    `below` seconds or more.

    Raises:
        MemoryLimitError: if none fits; says the smallest limit that would do.
    """
    search = _Search(ways[0].options.limit, decide, len(ways) == 1)
    for phase in zip_longest(*(_phases(way.options) for way in ways), fillvalue=()):
        for way, groups in zip(ways, phase, strict=True):
            if groups:
                search.add(way.bound, groups)
        fitted = search.run(below)
        if fitted is not None or search.waiting:
            return fitted
    raise search.error()


@dataclass(frozen=True)
class _Draft:
    """A candidate that may have to recompute in order to fit.

    Args:
        needed: bytes of a device of each stage, at least, whatever is recomputed.
        fit: what finds out how much; None as long as it recomputes nothing.
        fits: whether that is done.
    """

    attempt: Attempt
    candidate: Candidate
    needed: Sequence[int]
    fit: RecomputeFit | None = None
    fits: bool = False


@dataclass
class _Search:
    """Best first: of all that is left what may take the least time is looked at next, and gets more
    expensive to look at: options, their candidates, what these need, and what they need if they
    recompute. So the first that is known to fit is the fastest.

    Args:
        limit: bytes of a device; None if there is none.
        strict: whether what is requested must be possible.
        least: what needed least memory of all that does not fit.
        dropped: what cannot fit whatever is recomputed.
        ladders: what candidates can recompute, by their cuts and stages.
    """

    limit: int | None
    decide: Decide
    strict: bool
    least: tuple[Memory, Attempt] | None = None
    dropped: list[_Draft] = field(default_factory=list)
    ladders: dict[object, RecomputeLadders] = field(default_factory=dict)
    errors: list[ShardwrightError] = field(default_factory=list)
    seen: set[object] = field(default_factory=set)
    waiting: list[tuple[float, int, _Draft | Groups]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def add(self, bound: float, what: _Draft | Groups) -> None:
        """Something that takes at least `bound` seconds."""
        heappush(self.waiting, (bound, next(self.numbers), what))

    def run(self, below: float) -> Candidate | None:
        """The fastest that fits; None if none does, or while some wait that take `below` seconds or
        more."""
        while self.waiting and self.waiting[0][0] < below:
            bound, _, what = heappop(self.waiting)
            if isinstance(what, _Draft):
                fitted = self._fitted(what, bound)
                if fitted is not None:
                    return fitted
            else:
                self._try(bound, what)
        return None

    def _try(self, bound: float, groups: Groups) -> None:
        """The first of `groups`, and later the others."""
        fastest = bound
        for number, draft in enumerate(each for one in groups[0] for each in self._drafts(one)):
            seconds = max(bound, draft.candidate.seconds)
            fastest = min(fastest, seconds) if number else seconds
            self.add(seconds, draft)
        if len(groups) > 1:
            self.add(max(bound, NEAR * fastest), groups[1:])

    def _drafts(self, attempt: Attempt) -> Iterator[_Draft]:
        """What was not tried before, and may fit."""
        options = attempt.options
        try:
            decided = self.decide(options)
        except (PlanError, StrategyError) as error:
            if self.strict and not self.seen:
                raise
            self.errors.append(error)
            return
        for candidate in decided if options.cluster is not None else decided[:1]:
            same = _needed_by(candidate, attempt)
            if same in self.seen:
                continue
            self.seen.add(same)
            needed = least_memory(candidate.partitioned, options.optimizer)
            draft = _Draft(attempt, candidate, needed)
            if self.limit is None or max(needed) <= self.limit:
                yield draft
            else:
                self.dropped.append(draft)

    def _fitted(self, draft: _Draft, bound: float) -> Candidate | None:
        """A draft that fits; else it is added again with more recomputed, if that may do."""
        if self.limit is None or draft.fits:
            return draft.candidate
        candidate, attempt = draft.candidate, draft.attempt
        if draft.fit is not None:
            found = draft.fit.run()
            log.info("%s: %s of %s", attempt, binary(found.memory.peak), binary(self.limit))
            fitted = replace(candidate, decisions=found.decisions)
            self.add(max(bound, fitted.seconds), replace(draft, candidate=fitted, fits=True))
            return None
        if self._measured(draft).peak <= self.limit:
            return candidate
        if attempt.recompute:
            fit = self._recomputing(draft)
            if fit is not None:
                expected = replace(candidate, decisions=fit.expected())
                self.add(max(bound, NEAR * expected.seconds), replace(draft, fit=fit))
        return None

    def _measured(self, draft: _Draft) -> Memory:
        """What a draft needs if it recomputes nothing."""
        needs = draft.candidate.memory()
        log.info("%s: %s of %s", draft.attempt, binary(needs.peak), binary(self.limit or 0))
        self._failed(MemoryFit(draft.candidate.decisions, needs), draft.attempt)
        return needs

    def _ladders(self, candidate: Candidate) -> RecomputeLadders:
        """What a candidate can recompute, which is estimated for all levels of sharding at once."""
        graph, pipeline, cuts = candidate.model.graph, candidate.pipeline, candidate.decisions.cuts
        key = candidate.mesh, _hashable(cuts), pipeline.stages, pipeline.schedule
        if key not in self.ladders:
            options, prices = candidate.options, DEFAULT_PRICES
            if options.cluster is not None:
                dtype = graph.compute_dtype or torch.float32
                prices = RecomputePrices.on(options.known_cluster, dtype)
            depths = next(iter(self.ladders.values())).depths if self.ladders else None
            parts = graph, candidate.mesh, candidate.decisions, pipeline
            self.ladders[key] = RecomputeLadders(*parts, prices, depths)
        return self.ladders[key]

    def _recomputing(self, draft: _Draft) -> RecomputeFit | None:
        """What finds out how much is recomputed; None if all that can be is not enough. The blocks
        are the smallest that do."""
        candidate, limit = draft.candidate, self.limit or 0
        ladders = self._ladders(candidate)
        for depth in ladders.depths:
            fit = RecomputeFit(ladders.at(depth), candidate.decisions, candidate.memory, limit)
            if fit.begin():
                return fit
            self._failed(fit.least, draft.attempt)
        return None

    def _failed(self, fit: MemoryFit | None, attempt: Attempt) -> None:
        assert fit is not None
        if self.least is None or fit.memory.peak < self.least[0].peak:
            self.least = fit.memory, attempt

    def error(self) -> ShardwrightError:
        """That nothing fits, with what needs least; or why there was nothing."""
        for draft in sorted(self.dropped, key=lambda draft: max(draft.needed)):
            least = float("inf") if self.least is None else self.least[0].peak
            if max(draft.needed) >= least:
                break
            self._measured(draft)
            if draft.attempt.recompute:
                self._recomputing(draft)
        if self.least is None:
            return self.errors[0]
        needs, attempt = self.least
        return MemoryLimitError(_too_large(attempt, self.limit or 0, needs), needs.peak)


def _phases(options: PlanOptions) -> list[Groups]:
    """What is tried, one after the other until something fits."""
    if options.limit is None:
        return [[[Attempt(options, False)]]]
    first = options.recompute == AUTO_RECOMPUTE
    phases: list[Groups] = []
    if options.has_auto_mem_coeff:
        coefficients, limit = options.mem_coeffs, options.limit
        each = [replace(options, mem_coeff=one, memory_limit=limit) for one in coefficients]
        phases, options = [[[Attempt(one, first)]] for one in each], each[0]
    if options.cluster is not None:
        larger = (options, *_larger_mem_coeff(options))
        return [*phases, [[Attempt(one, True) for one in _levels(each)] for each in larger]]
    levels = _levels(options)
    phases += [[[Attempt(each, first)]] for each in levels]
    for staged in (levels[-1], *_more_stages(levels[-1])):
        phases += [[[Attempt(each, True)]] for each in (staged, *_larger_mem_coeff(staged))]
    return phases


def _levels(options: PlanOptions) -> tuple[PlanOptions, ...]:
    return (options, *_more_sharded(options))


def _more_sharded(options: PlanOptions) -> Iterator[PlanOptions]:
    sharding = options.sharding
    done = LEVELS.index(sharding.level) + 1 if sharding is not None else 0
    for level in LEVELS[done:]:
        if level == "level2" and options.num_micro_batches == 1:
            continue  # As `level1`: there is one reduction.
        yield replace(options, hsdp=replace(sharding or OptimizerParallel(), level=level))


def _larger_mem_coeff(options: PlanOptions) -> Iterator[PlanOptions]:
    if "mem_coeff" not in options.of_search:
        return
    coefficient = options.coefficient * FACTOR
    while coefficient <= LARGEST_MEM_COEFF:
        yield replace(options, mem_coeff=coefficient)
        coefficient *= FACTOR


def _more_stages(options: PlanOptions) -> Iterator[PlanOptions]:
    """Where the user left the stages to be cut, every greater number that divides the devices and
    that the schedule runs with as many micro-batches."""
    if options.stage_config is not None or not isinstance(options.stages, int):
        return
    for stages in range(options.stages + 1, options.devices + 1):
        if options.devices % stages == 0:
            try:
                check_pipelining(PipelineSpec(stages, options.num_micro_batches, options.schedule))
            except PlanError:
                continue
            yield replace(options, stages=stages)


def _needed_by(candidate: Candidate, attempt: Attempt) -> object:
    """What memory and time depend on; the level only where it shards anything."""
    decisions = candidate.decisions
    used = storage_as_used(candidate.model.graph, candidate.mesh, decisions.cuts)
    level = decisions.sharding if decisions.storage != used else None
    kept = tuple(sorted(decisions.storage.items())), level
    pipeline = candidate.pipeline.stages, candidate.pipeline.schedule
    return kept, _hashable(decisions.cuts), pipeline, attempt.recompute


def _hashable(cuts: Mapping[str, Cuts]) -> object:
    return tuple((name, tuple(cut.items())) for name, cut in cuts.items())


def _too_large(attempt: Attempt, limit: int, needs: Memory) -> str:
    stage = max(needs.stages, key=lambda each: each.peak)
    where = f" on stage {stage.stage}" if len(needs.stages) > 1 else ""
    options = attempt.options
    stages = ""
    if options.cluster is not None and options.stages == 1 < options.num_micro_batches:
        stages = ", or stages='auto'"
    return (
        f"no plan for {options.devices} devices fits into memory_limit="
        f"{binary(limit)}; the smallest one needs {binary(needs.peak)}"
        f" ({needs.peak:,} bytes){where}, with {attempt}: {_breakdown(stage)}; set a larger"
        f" limit, or use more devices or more micro-batches{stages}"
    )


def _breakdown(stage: StageMemory) -> str:
    kinds = ("parameters", "optimizer", "gradients", "gathered", "activations", "temporary")
    sizes = ((kind, getattr(stage, kind)) for kind in kinds)
    return ", ".join(f"{kind} {binary(size)}" for kind, size in sizes if size)

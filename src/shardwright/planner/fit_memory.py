"""Candidates that fit into the memory of their devices."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwright.cost.memory import Memory, StageMemory, binary
from shardwright.cost.pipeline_timeline import check_pipelining
from shardwright.errors import MemoryLimitError, PlanError, StrategyError
from shardwright.partition.decisions import LEVELS, OptimizerParallel
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.planner.candidate import Candidate, Decide
from shardwright.planner.options import AUTO_RECOMPUTE, MEM_COEFFS, PlanOptions
from shardwright.search.recompute.candidates import DEFAULT_PRICES, RecomputePrices
from shardwright.search.recompute.fit import fit_by_recomputation

log = logging.getLogger("shardwright.search")

FACTOR, LARGEST_MEM_COEFF = 8.0, 1e4
"""By what `mem_coeff` grows from one attempt to the next, and how far."""

GAIN = 0.01
"""Less of a step is not worth a further attempt."""


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


def within_memory(options: PlanOptions, decide: Decide) -> Candidate:
    """The candidate that `options` request if it fits into their memory limit, else the first that
    does after these changes, each on top of those before: parameters and optimizer state are stored
    sharded (`level1` to `level3`), operators are computed again, `mem_coeff` grows, there are more
    stages. With `recompute="auto"`, operators are computed again first. On a cluster, of all levels
    of sharding and `mem_coeff`, each with as much computed again as it needs, the fastest that fits
    is taken. With `mem_coeff="auto"` it is the smallest with which the plan fits without other
    changes; where there is none, the changes begin with the smallest.

    Raises:
        MemoryLimitError: if none fits; says the smallest limit that would do.
    """
    candidate = faster_within_memory(options, decide, float("inf"))
    assert candidate is not None
    return candidate


def faster_within_memory(options: PlanOptions, decide: Decide, below: float) -> Candidate | None:
    """Likewise; None if what fits takes `below` seconds or more.

    Raises:
        MemoryLimitError: if none fits; says the smallest limit that would do.
    """
    coefficients = MEM_COEFFS if options.has_auto_mem_coeff else ()
    if coefficients:
        options = replace(options, mem_coeff=coefficients[0], memory_limit=options.limit)
    requested = decide(options)[0]
    if options.limit is None or requested.memory().peak <= options.limit:
        return requested if requested.seconds < below else None
    fitting = _Fitting(options, decide, below)
    for choices in _attempts(options, coefficients[1:]):
        fastest = fitting.fastest(choices)
        if fastest is not None or fitting.too_slow:
            return fastest
    needs, attempt = fitting.least_memory()
    raise MemoryLimitError(_too_large(options, needs, attempt), needs.peak)


@dataclass
class _Fitting:
    """The attempts that were made for some options.

    Args:
        below: seconds; only what takes less counts.
        least: what needed least memory of all that did not fit.
        hopeless: the last that does not fit whatever is computed again.
        too_slow: whether an attempt did not count.
    """

    options: PlanOptions
    decide: Decide
    below: float
    least: tuple[Memory, Attempt] | None = None
    hopeless: tuple[Candidate, Attempt] | None = None
    too_slow: bool = False
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def fastest(self, choices: Iterable[Attempt]) -> Candidate | None:
        """The fastest of these that fits: as it is, or with operators computed again where that is
        allowed. As that only adds to a step, those that are fast as they are come first, and no
        more are fitted once there is hardly any time to gain."""
        best: Candidate | None = None
        entries = [entry for attempt in choices for entry in self._candidates(attempt)]
        for candidate, attempt in sorted(entries, key=lambda entry: entry[0].seconds):
            if best is not None and candidate.seconds >= (1 - GAIN) * best.seconds:
                break
            if self._is_slow(candidate, best):
                continue
            fitted, needs = candidate, candidate.memory()
            if not self._fits(needs, attempt) and attempt.recompute:
                if _always_there(needs) > self.limit:
                    self.hopeless = candidate, attempt
                    continue
                fitted, needs = self._with_recomputation(candidate)
                self._fits(needs, attempt)
            if needs.peak <= self.limit and not self._is_slow(fitted, best):
                best = fitted
        return best

    def least_memory(self) -> tuple[Memory, Attempt]:
        """What needs least memory of all that does not fit."""
        if self.hopeless is not None:
            candidate, attempt = self.hopeless
            self._fits(self._with_recomputation(candidate)[1], attempt)
        assert self.least is not None
        return self.least

    def _is_slow(self, candidate: Candidate, best: Candidate | None) -> bool:
        """Whether a candidate does not count, beside the best so far."""
        if best is not None and self.options.cluster is not None:
            return candidate.seconds >= best.seconds
        slow = candidate.seconds >= self.below
        self.too_slow |= slow
        return slow

    def _fits(self, needs: Memory, attempt: Attempt) -> bool:
        log.info("%s: %s of %s", attempt, binary(needs.peak), binary(self.limit))
        if needs.peak > self.limit and (self.least is None or needs.peak < self.least[0].peak):
            self.least = needs, attempt
        return needs.peak <= self.limit

    def _with_recomputation(self, candidate: Candidate) -> tuple[Candidate, Memory]:
        """With as much computed again as it needs, or as can be."""
        graph, options, prices = candidate.model.graph, self.options, DEFAULT_PRICES
        if options.cluster is not None:
            prices = RecomputePrices.on(options.known_cluster, graph.compute_dtype or torch.float32)
        fitted = fit_by_recomputation(
            graph,
            candidate.mesh,
            candidate.decisions,
            candidate.pipeline,
            self.limit,
            candidate.memory,
            prices,
        )
        return replace(candidate, decisions=fitted.decisions), fitted.memory

    @property
    def limit(self) -> int:
        """Bytes of a device."""
        assert self.options.limit is not None
        return self.options.limit

    def _candidates(self, attempt: Attempt) -> Iterator[tuple[Candidate, Attempt]]:
        """What was not tried before."""
        try:
            decided = self.decide(attempt.options)
        except (PlanError, StrategyError):
            if attempt.options == self.options:
                raise
            return
        for candidate in decided if self.options.cluster is not None else decided[:1]:
            needed_by = _needed_by(candidate, self.seen, attempt)
            if needed_by not in self.seen:
                self.seen.append(needed_by)
                yield candidate, attempt


def _always_there(needs: Memory) -> int:
    """Bytes that a device needs whatever is computed again."""
    return max(stage.parameters + stage.optimizer + stage.inputs for stage in needs.stages)


def _attempts(options: PlanOptions, coefficients: Sequence[float]) -> Iterator[Iterable[Attempt]]:
    """What is tried, one after the other until something fits; of several the fastest."""
    first = options.recompute == AUTO_RECOMPUTE
    levels = tuple(_more_sharded(options))
    stored = levels[-1] if levels else options
    by_time = options.cluster is not None
    if not by_time or coefficients:
        yield [Attempt(options, first)]
    for coefficient in coefficients:
        yield [Attempt(replace(options, mem_coeff=coefficient), first)]
    if by_time:
        by_coefficient = (options, *_larger_mem_coeff(options))
        yield [
            Attempt(level, True)
            for each in by_coefficient
            for level in (each, *_more_sharded(each))
        ]
    else:
        yield from ([Attempt(each, first)] for each in levels)
        yield [Attempt(stored, True)]
        yield from ([Attempt(larger, True)] for larger in _larger_mem_coeff(stored))
    for staged in _more_stages(stored):
        yield [Attempt(staged, True)]
        yield from ([Attempt(larger, True)] for larger in _larger_mem_coeff(staged))


def _more_sharded(options: PlanOptions) -> Iterator[PlanOptions]:
    sharding = options.sharding
    done = LEVELS.index(sharding.level) + 1 if sharding is not None else 0
    for level in LEVELS[done:]:
        if level == "level2" and options.micro_batches == 1:
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
                check_pipelining(PipelineSpec(stages, options.micro_batches, options.schedule))
            except PlanError:
                continue
            yield replace(options, stages=stages)


def _needed_by(
    candidate: Candidate, seen: list[tuple[Any, ...]], attempt: Attempt
) -> tuple[Any, ...]:
    """What the memory depends on; the level only where it shards anything."""
    decisions = candidate.decisions
    level = decisions.sharding
    if any(decisions.storage == storage and other is None for storage, other, *_ in seen):
        level = None
    return decisions.storage, level, decisions.cuts, candidate.pipeline, attempt.recompute


def _too_large(options: PlanOptions, needs: Memory, attempt: Attempt) -> str:
    stage = max(needs.stages, key=lambda each: each.peak)
    where = f" on stage {stage.stage}" if len(needs.stages) > 1 else ""
    return (
        f"no plan for {options.devices} devices fits into memory_limit="
        f"{binary(options.limit or 0)}; the smallest one needs {binary(needs.peak)}"
        f" ({needs.peak:,} bytes){where}, with {attempt}: {_breakdown(stage)}; set a larger"
        " limit, or use more devices or more micro-batches"
    )


def _breakdown(stage: StageMemory) -> str:
    kinds = ("parameters", "optimizer", "gradients", "gathered", "activations", "temporary")
    sizes = ((kind, getattr(stage, kind)) for kind in kinds)
    return ", ".join(f"{kind} {binary(size)}" for kind, size in sizes if size)

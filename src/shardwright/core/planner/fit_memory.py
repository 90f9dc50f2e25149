"""The fastest candidate that fits into the memory of its devices."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, zip_longest

from shardwright.core.cost.memory import Memory, binary, least_memory
from shardwright.core.plan.ranked import LeftOut, PlanKind
from shardwright.core.planner.attempts import Attempt, Groups, phases, too_large
from shardwright.core.planner.candidate import Candidate, Decide
from shardwright.core.planner.drafts import Draft, KnownRecomputation, needed_by
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.core.search.recompute.fit import MemoryFit, RecomputeFit
from shardwright.errors import (
    PlanError,
    PlanInterrupted,
    ShardwrightError,
    StrategyError,
)
from shardwright.progress import OnProgress, nested_progress

log = logging.getLogger("shardwright.search")

NEAR = 0.97
"""A larger `mem_coeff` may have a step that is predicted to take so much of that of a smaller one:
what the search weighs is simpler than the prediction."""

NEARLY_EXPECTED = 0.99
"""What fits may have a step that takes so much of what is expected from estimates."""


@dataclass(frozen=True)
class Way:
    """Options that are tried, and then further ones.

    Args:
        options: with a number of stages and a schedule.
        bound: seconds; a step takes at least so long.
    """

    options: PlanOptions
    bound: float = 0.0


def within_memory(
    options: PlanOptions, decide: Decide, ranking: Ranking | None = None
) -> Candidate:
    """The candidate that `options` request if it fits into their memory limit, else the first that
    does after these changes, each on top of those before: parameters and optimizer state are stored
    sharded (`level1` to `level3`), operators are computed again, `mem_coeff` grows, there are more
    stages. With `recompute="auto"`, operators are computed again first. On a cluster the number of
    stages stays, and of all levels of sharding and `mem_coeff`, each with as much computed again as
    it needs, the fastest that fits is taken, so that less memory is never faster. With
    `mem_coeff="auto"` it is the smallest with which the plan fits without other changes; where
    there is none, the changes begin with the smallest.

    Args:
        ranking: as `fastest_within_memory`.

    Raises:
        MemoryLimitError: if none fits; says the smallest limit that would do.
    """
    candidate = fastest_within_memory([Way(options)], decide, ranking=ranking)
    assert candidate is not None
    return candidate


def fastest_within_memory(
    ways: Sequence[Way],
    decide: Decide,
    below: float = float("inf"),
    ranking: Ranking | None = None,
) -> Candidate | None:
    """Of several ways that differ in their stages the fastest that fits; None if none is known to
    take less than `below` seconds.

    Args:
        ranking: is told the fastest of each kind, as long as it wants one, and of other kinds why
            there is none.

    Raises:
        MemoryLimitError: if none fits, whatever it takes; says the smallest limit that would do.
        PlanInterrupted: at Ctrl-C, if one is known to fit by then.
    """
    search = _Search(ways[0].options.limit, decide, len(ways) == 1)
    try:
        return _fastest(search, ways, below, ranking)
    except KeyboardInterrupt:
        known = search.known_to_fit()
        if not known:
            raise
        best = min(known, key=lambda candidate: candidate.seconds)
        raise PlanInterrupted(best.plan) from None


def _fastest(
    search: _Search, ways: Sequence[Way], below: float, ranking: Ranking | None
) -> Candidate | None:
    on_progress = search.counted(ways[0].options.on_progress)
    every = [phases(replace(way.options, on_progress=on_progress)) for way in ways]
    for phase in zip_longest(*every, fillvalue=()):
        for way, groups in zip(ways, phase, strict=True):
            if groups:
                search.add(way.bound, groups)
        fitted = search.run(below)
        if fitted is not None and ranking is not None:
            search.rank(fitted, ranking)
        if fitted is not None or search.waiting:
            return fitted
    if below < float("inf"):
        return None
    search.measure_dropped()
    fitted = search.run(below)
    if fitted is not None or search.waiting:
        return fitted
    raise search.error()


@dataclass
class _Search:
    """Best first: of all that is left what may take the least time is looked at next, and gets more
    expensive to look at: options, their candidates, what these need, and what they need if they
    recompute. So the first that is known to fit is the fastest.

    Args:
        limit: bytes of a device; None if there is none.
        strict: whether what is requested must be possible.
        least: what needed least memory of all that does not fit.
        dropped: what cannot fit whatever is recomputed, or not with blocks at a depth.
        recomputing: what drafts can recompute.
        errors: of options with which the model cannot be planned.
        peaks: by kind the least that was measured of what does not fit.
        looked_at: how much of what waited was looked at.
    """

    limit: int | None
    decide: Decide
    strict: bool
    least: tuple[Memory, Attempt] | None = None
    dropped: list[Draft] = field(default_factory=list)
    recomputing: KnownRecomputation = field(default_factory=KnownRecomputation)
    errors: list[tuple[PlanOptions, ShardwrightError]] = field(default_factory=list)
    peaks: dict[PlanKind, int] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)
    looked_at: int = 0
    waiting: list[tuple[float, float, int, Draft | Groups]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def add(self, bound: float, what: Draft | Groups, seconds: float = 0.0) -> None:
        """Something that takes at least `bound` seconds.

        Args:
            seconds: likewise, if nothing else were known; of two with the same bound the one that
                takes less comes first.
        """
        heappush(self.waiting, (max(bound, seconds), seconds, next(self.numbers), what))

    def counted(self, on_progress: OnProgress) -> OnProgress:
        """A callback that is told how much was looked at, of that and all that waits."""

        def report(doing: str, done: int = 0, of: int = 0) -> None:
            every = self.looked_at + 1 + len(self.waiting)
            nested_progress(on_progress, "", self.looked_at, every)(doing, done, of)

        return report

    def run(self, below: float) -> Candidate | None:
        """The fastest that fits; None if none does, or while some wait that take `below` seconds or
        more."""
        while self.waiting and self.waiting[0][0] < below:
            bound, _, _, what = front = heappop(self.waiting)
            try:
                if not isinstance(what, Draft):
                    self._try(bound, what)
                elif (fitted := self._fitted(what, bound)) is not None:
                    return fitted
            except KeyboardInterrupt:
                heappush(self.waiting, front)
                raise
            self.looked_at += 1
        return None

    def known_to_fit(self) -> list[Candidate]:
        """What waits and fits: with as much recomputed as it needs, or with all that can be. If
        that was found of nothing yet, it is found out of the first that may."""
        drafts = [what for *_, what in self.waiting if isinstance(what, Draft)]
        known = [draft.candidate for draft in drafts if draft.fits]
        for draft in drafts:
            if draft.fit is None or draft.fits or (known and not draft.fit.is_measured):
                continue
            least = draft.fit.least
            if least.memory.peak <= (self.limit or 0):
                fitted = replace(draft.candidate, decisions=least.decisions, measured=least.memory)
                known.append(fitted)
        return known

    def rank(self, fitted: Candidate | None, ranking: Ranking) -> None:
        """After the fastest candidate those of other kinds, and why there is none of the rest."""
        while fitted is not None:
            ranking.add(fitted)
            goes_on = ranking.wants(kind for _, kind in self._waiting())
            fitted = self.run(float("inf")) if goes_on else None
        for bound, kind in self._waiting():
            ranking.leave_out(kind, LeftOut.slower(bound))
        for kind, peak in self.peaks.items():
            ranking.leave_out(kind, LeftOut.larger(peak))
        for draft in self.dropped:
            kind = requested_kind(draft.attempt.options)
            ranking.leave_out(kind, LeftOut.larger(draft.floor))
        for options, error in self.errors:
            ranking.leave_out(requested_kind(options), LeftOut.because(str(error)))

    def _waiting(self) -> Iterator[tuple[float, PlanKind]]:
        """What is left, with the seconds that it takes at least."""
        for bound, _, _, what in self.waiting:
            attempts = (
                [what.attempt]
                if isinstance(what, Draft)
                else [attempt for group in what for attempt in group]
            )
            for attempt in attempts:
                yield bound, requested_kind(attempt.options)

    def _try(self, bound: float, groups: Groups) -> None:
        """The first of `groups`, and later the others."""
        fastest = bound
        for number, draft in enumerate(each for one in groups[0] for each in self._drafts(one)):
            seconds = max(bound, draft.candidate.seconds)
            fastest = min(fastest, seconds) if number else seconds
            self.add(seconds, draft)
        if len(groups) > 1:
            self.add(max(bound, NEAR * fastest), groups[1:])

    def _drafts(self, attempt: Attempt) -> Iterator[Draft]:
        """What was not tried before, and may fit."""
        options, is_first = attempt.options, not self.seen
        try:
            for candidate in self.decide(options):
                draft = self._fresh(candidate, attempt)
                if draft is not None and self._may_fit(draft):
                    draft = self._aligned(draft)
                if draft is None:
                    continue
                if self._may_fit(draft):
                    yield draft
                else:
                    self.dropped.append(draft)
        # Some stages are found not to be possible only when they are divided.
        except (PlanError, StrategyError) as error:
            if self.strict and is_first:
                raise
            self.errors.append((options, error))

    def _may_fit(self, draft: Draft) -> bool:
        return self.limit is None or max(draft.needed) <= self.limit

    def _fresh(self, candidate: Candidate, attempt: Attempt) -> Draft | None:
        """A draft; None if there was one like it."""
        same = needed_by(candidate, attempt)
        if same in self.seen:
            return None
        self.seen.add(same)
        needed = least_memory(candidate.partitioned, attempt.options.optimizer)
        return Draft(attempt, candidate, needed)

    def _aligned(self, draft: Draft) -> Draft | None:
        """The same, aligned; None if there was one like it."""
        aligned = draft.candidate.aligned
        return draft if aligned is draft.candidate else self._fresh(aligned, draft.attempt)

    def _fitted(self, draft: Draft, bound: float) -> Candidate | None:
        """A draft that fits; else it is added again with more recomputed, if that may do."""
        if self.limit is None or draft.fits:
            return draft.candidate
        candidate, attempt = draft.candidate, draft.attempt
        if draft.fit is not None:
            found = draft.fit.run()
            log.info("%s: %s of %s", attempt, binary(found.memory.peak), binary(self.limit))
            if found.memory.peak > self.limit:
                self.add(bound, replace(draft, fit=None, sure=False))
                return None
            fitted = replace(candidate, decisions=found.decisions, measured=found.memory)
            self.add(bound, replace(draft, candidate=fitted, fits=True), fitted.seconds)
            return None
        if draft.recomputes:
            for fit in self._recomputing(draft):
                expected = replace(candidate, decisions=fit.expected())
                self.add(bound, replace(draft, fit=fit), NEARLY_EXPECTED * expected.seconds)
            return None
        ladders = self.recomputing.ladders(candidate) if attempt.recompute else None
        plain = ladders is None or ladders.may_fit_plain(draft.needed, self.limit)
        if plain and (needs := self._measured(draft)).peak <= self.limit:
            return replace(candidate, measured=needs)
        if ladders is not None:
            decisions = ladders.expected(candidate.decisions, draft.needed, self.limit)
            expected = replace(candidate, decisions=decisions)
            self.add(bound, replace(draft, recomputes=True), NEARLY_EXPECTED * expected.seconds)
        return None

    def _measured(self, draft: Draft) -> Memory:
        """What a draft needs if it recomputes nothing."""
        needs = draft.candidate.memory()
        log.info("%s: %s of %s", draft.attempt, binary(needs.peak), binary(self.limit or 0))
        self._failed(MemoryFit(draft.candidate.decisions, needs), draft.attempt)
        return needs

    def _recomputing(self, draft: Draft) -> list[RecomputeFit]:
        """What finds out how much is recomputed, for blocks at each depth that competes; none if
        all that can be is not enough. The blocks are the smallest that do."""
        ladders, outside = self.recomputing.ladders(draft.candidate), 0
        for depths in ladders.depths:
            fits: list[RecomputeFit] = []
            for depth in depths:
                least = [max(size, outside) for size in ladders.least(depth, draft.needed)]
                if max(least) > (self.limit or 0):
                    self.dropped.append(replace(draft, depth=depth, least=max(least)))
                    continue
                fit = self.recomputing.fit(draft, depth, self.limit or 0)
                if fit.can_fit:
                    fits.append(fit)
                    continue
                outside = max(outside, fit.outside)
                if fit.is_measured:
                    self._failed(fit.least, draft.attempt)
                else:
                    short = replace(draft, depth=depth, least=fit.largest.peak)
                    self.dropped.append(short)
            if fits:
                return fits
        return []

    def _failed(self, fit: MemoryFit, attempt: Attempt) -> None:
        kind = requested_kind(attempt.options)
        self.peaks[kind] = min(self.peaks.get(kind, fit.memory.peak), fit.memory.peak)
        if self.least is None or fit.memory.peak < self.least[0].peak:
            self.least = fit.memory, attempt

    def measure_dropped(self) -> None:
        """Finds what needs least of all that was left out for what it needs at least. What fits
        although an estimate said otherwise is added again."""
        while self.dropped:
            draft = min(self.dropped, key=lambda draft: draft.floor)
            self.dropped.remove(draft)
            if not self._may_be_least(draft.floor):
                break
            if draft.depth is not None:
                self._measure_recomputing(draft, draft.depth)
            elif (aligned := self._aligned(draft)) is None:
                continue
            elif draft.attempt.recompute:
                self.dropped.extend(self._at_depths(aligned))
            else:
                self._measured(aligned)

    def _may_be_least(self, size: int) -> bool:
        return self.least is None or size < self.least[0].peak

    def _measure_recomputing(self, draft: Draft, depth: int) -> None:
        """What a draft needs that recomputes all that it can; of what cannot be the least only the
        stage that needs most."""
        fit = self.recomputing.fit(replace(draft, sure=False), depth, self.limit or 0)
        if fit.can_fit:
            self.add(0.0, replace(draft, fit=fit), draft.candidate.seconds)
        elif self._may_be_least(fit.largest.peak):
            self._failed(fit.least, draft.attempt)

    def _at_depths(self, draft: Draft) -> Iterator[Draft]:
        """A draft with all blocks recomputed, for each depth that these may have."""
        ladders = self.recomputing.ladders(draft.candidate)
        for depth in (depth for depths in ladders.depths for depth in depths):
            yield replace(draft, depth=depth, least=max(ladders.least(depth, draft.needed)))

    def error(self) -> ShardwrightError:
        """That nothing fits, with what needs least; or why there was nothing."""
        if self.least is None:
            return self.errors[0][1]
        needs, attempt = self.least
        return too_large(attempt, self.limit or 0, needs)

"""Single operators decided again over all axes, with everything around them known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwright.rules.rule import Cuts
from shardwright.search.by_time.objective import Objective, ObjectiveCost
from shardwright.search.by_time.problem import OpVariable, TensorEdge

Total = Callable[[ObjectiveCost], float]

MAX_NEW_PRICES = 500
"""So many values may be priced between layouts that were not met before: finding conversions takes
nearly all of a sweep's time."""

MIN_COMMUNICATION_SHARE = 1e-4
"""An operator is tried where conversions around it take at least this share of the step."""


def local_search(
    objective: Objective, cuts: list[Cuts], total: Total, rounds: int, gain: float
) -> None:
    """Changes `cuts` of one operator after the other as long as the total becomes less.

    Args:
        total: what counts.
        rounds: at most so many times all operators are tried.
        gain: relative; less is none.
    """
    around = objective.network.streams_of()
    tried = [
        _Here(objective, number, node, around[number])
        for number, node in enumerate(objective.network.nodes)
        if node.pinned is None and node.kind.factors
    ]
    whole = objective.cost(cuts)
    best = total(whole)
    most = objective.priced + MAX_NEW_PRICES
    for _ in range(rounds):
        before = best
        # Those with most to gain first: of blocks that repeat, the one that stands for most.
        for here in sorted(tried, key=lambda one: -one.conversions(cuts)):
            if here.conversions(cuts) <= MIN_COMMUNICATION_SHARE * best:
                continue
            if objective.priced > most:
                return
            number = here.number
            rest = whole.plus(here.cost(cuts), -1)
            for other in list(here.changes(cuts)):
                kept, cuts[number] = cuts[number], other
                changed = here.added(rest, cuts, total, best * (1 - gain))
                if changed is not None:
                    whole, best = changed, total(changed)
                else:
                    cuts[number] = kept
        if best >= before * (1 - gain):
            return


@dataclass(frozen=True)
class _Here:
    """One operator and the values that it makes and reads."""

    objective: Objective
    number: int
    node: OpVariable
    streams: list[TensorEdge]

    def cost(self, cuts: list[Cuts]) -> ObjectiveCost:
        """All that depends on the cuts of this operator."""
        found = ObjectiveCost().plus(
            self.objective.operator(self.node, cuts[self.number]), self.node.count
        )
        for stream in self.streams:
            found = found.plus(self.objective.stream(stream, cuts), stream.count)
        return found

    def added(
        self, rest: ObjectiveCost, cuts: list[Cuts], total: Total, bound: float
    ) -> ObjectiveCost | None:
        """`rest` and all that depends on the cuts of this operator; None if not below `bound`."""
        found = rest.plus(self.objective.operator(self.node, cuts[self.number]), self.node.count)
        unknown = []
        for stream in self.streams:
            known = self.objective.known(stream, cuts)
            if known is None:
                unknown.append(stream)
            else:
                found = found.plus(known, stream.count)
        for stream in unknown:
            # Finding the conversions of a value takes longest: not where they come too late.
            if total(found) >= bound:
                return None
            found = found.plus(self.objective.stream(stream, cuts), stream.count)
        return found if total(found) < bound else None

    def conversions(self, cuts: list[Cuts]) -> float:
        """Seconds of conversions around the operator: there is no more to gain here."""
        return sum(self.objective.stream(s, cuts).conversions * s.count for s in self.streams)

    def changes(self, cuts: list[Cuts]) -> Iterator[Cuts]:
        """The cuts of neighbors as far as they can be taken over, and changes of one axis."""
        mine = {axis: f for f, axes in cuts[self.number].items() for axis in axes}
        known = [mine]
        for wanted in self._followed(cuts):
            if wanted not in known:
                known.append(wanted)
                yield self._cut(wanted)
        for axis in self._axes(cuts):
            for factor in (*self.node.kind.factors, None):
                changed = {a: f for a, f in mine.items() if a != axis}
                if factor is not None:
                    changed[axis] = factor
                if changed not in known:
                    known.append(changed)
                    yield self._cut(changed)

    def _axes(self, cuts: list[Cuts]) -> list[int]:
        """The axes; of those that are alike for this operator and its neighbors the last."""
        model = self.objective.model
        ends = {n for s in self.streams for n, _ in s.readers}
        ends |= {s.source[0] for s in self.streams if s.source is not None}
        factors = [{a: f for f, axes in cuts[n].items() for a in axes} for n in sorted(ends)]
        found: dict[object, int] = {}
        for axis, size in enumerate(model.mesh.device_matrix):
            if size > 1:
                theirs = tuple(cut.get(axis) for cut in factors)
                found[model.links.levels[axis], size, theirs] = axis
        return sorted(found.values())

    def _followed(self, cuts: list[Cuts]) -> Iterator[dict[int, str]]:
        """What the operator would cut to treat a value as a neighbor treats it."""
        nodes, layouts = self.objective.network.nodes, self.objective.layouts
        for stream in self.streams:
            ends = [(n, 0, place) for n, place in stream.readers]
            if stream.source is not None:
                ends.append((stream.source[0], 1, stream.source[1]))
            mine = [(side, place) for n, side, place in ends if n == self.number]
            for n, side, place in ends:
                if n == self.number:
                    continue
                theirs = layouts(nodes[n], cuts[n])[side][place].axes
                for own_side, own_place in mine:
                    kind = self.node.kind
                    dims = (kind.inputs, kind.outputs)[own_side][own_place]
                    yield {
                        axis: kind.factors[factor]
                        for factor, axes in zip(dims, theirs, strict=True)
                        if factor >= 0
                        for axis in axes
                    }

    def _cut(self, wanted: dict[int, str]) -> Cuts:
        """Each factor cut on its axes, as far as it divides."""
        kind, mesh = self.node.kind, self.objective.model.mesh
        found: dict[str, tuple[int, ...]] = {}
        for axis in sorted(wanted):
            factor = wanted[axis]
            taken = (*found.get(factor, ()), axis)
            if kind.limits[kind.factors.index(factor)] % mesh.size(taken) == 0:
                found[factor] = taken
        return found

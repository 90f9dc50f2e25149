"""What is decided around one operator, and the cut of it that redistributes least there.

*Redistribution* is what it costs that two operators lay out the tensor between them differently.
What an operator communicates for its own cut is none: that a partial sum is summed up, and that the
gradient of an input which it reads whole is. Otherwise the operator behind a product that is cut
where it sums would best be cut anyhow, and no weight would be cut for the price of its gradient. Of
cuts that redistribute alike the one whose partial sums take the least comes first, as published:
MindSpore's propagation sorts strategies without redistribution by their own forward communication
(`Edge::GetNextOpStrategyByPrevOpStrategyWithMiniComm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, product
from math import prod

from shardwright.core.graph.graph import Op
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.rules.rule import Cuts, ShardingRule
from shardwright.core.search.decided_layouts import Between, TensorContext, bare, inner_reductions
from shardwright.core.search.nearby_cuts import (
    NearbyCuts,
    SharedTensor,
    factor_of_axis,
    group_equal_axes,
    unjoined_limits,
)

CANDIDATES = 512
"""At most so many cuts are tried at once for one operator; one-axis changes of the best follow."""

LocalCost = tuple[int, int, int]
"""Bytes of redistribution, of summing up the operator's own partial sums, of memory on a device."""


@dataclass(frozen=True, eq=False)
class LocalProblem:
    """One operator among what is decided.

    Args:
        inputs, outputs: of each of its tensors what is decided about it.
    """

    op: Op
    rule: ShardingRule
    mesh: DeviceMatrix
    inputs: tuple[TensorContext, ...]
    outputs: tuple[TensorContext, ...]

    def cheapest(self) -> dict[str, Axes]:
        """The cut with the least cost, then traffic; of equal ones the first candidate."""
        best = self._least(self.candidates())
        while True:
            better = self._least(chain((best,), self._changes(best)))
            if better == best:
                return best
            best = better

    def again(self, cuts: dict[str, Axes], forward: bool) -> dict[str, Axes]:
        """What to cut instead of `cuts`, now that all neighbors are decided.

        Never at more cost. Where nothing redistributes less, but as little, it is what agrees with
        the inputs (or the outputs, if not `forward`): so redistributions move along tensors of
        equal size, to where they may become cheaper.
        """
        bound = self.cost(cuts)
        if bound is None or not bound[0]:
            return cuts

        def near(cuts: Cuts) -> int:
            read, left = self.rule.layouts(self.mesh, cuts)
            side = self._entering(read) if forward else self._leaving(left)
            return sum(context.redistribution(*between) for context, between in side)

        best, least = cuts, (bound[0], near(cuts), *bound[1:])
        for other in chain(self.candidates(), self._changes(cuts)):
            cost = self.cost(other, bound)
            if cost is not None and (key := (cost[0], near(other), *cost[1:])) < least:
                best, least = other, key
        return best

    def _least(self, candidates: Iterable[dict[str, Axes]]) -> dict[str, Axes]:
        """The first of the cheapest.

        Traffic is looked at only where the cost is equal: most of its redistributions are needed
        nowhere else, and finding one takes time.
        """
        least: LocalCost | None = None
        equal: list[dict[str, Axes]] = []
        for cuts in candidates:
            cost = self.cost(cuts, least)
            if cost is not None and cost != least:
                least, equal = cost, []
            if cost is not None and cuts not in equal:
                equal.append(cuts)
        return equal[0] if len(equal) == 1 else min(equal, key=self.traffic)

    def cost(self, cuts: Cuts, bound: LocalCost | None = None) -> LocalCost | None:
        """What it costs beside what is decided; None if above `bound`."""
        read, left = self.rule.layouts(self.mesh, cuts)
        tensors = zip((*self.inputs, *self.outputs), (*read, *left), strict=True)
        memory = sum(context.local_bytes(layout) for context, layout in tensors)
        own = sum(
            context.traffic(layout, bare(layout), ())
            for context, layout in zip(self.outputs, left, strict=True)
        )
        redistribution = 0
        for context, between in chain(self._entering(read), self._leaving(left)):
            redistribution += context.redistribution(*between)
            if bound is not None and (redistribution, own, memory) > bound:
                return None
        return redistribution, own, memory

    def traffic(self, cuts: Cuts) -> int:
        """All bytes that cutting the operator so sends, for gradients of parameters too."""
        read, left = self.rule.layouts(self.mesh, cuts)
        inner = inner_reductions(self.op, self.rule, self.mesh, cuts)
        sent = sum(size for _, size in inner)
        for context, between in chain(self._entering(read), self._leaving(left)):
            sent += context.traffic(*between)
        return sent

    def _entering(self, read: tuple[TensorLayout, ...]) -> Iterator[tuple[TensorContext, Between]]:
        for context, layout in zip(self.inputs, read, strict=True):
            source = bare(layout) if context.stored else context.source
            if source is not None:
                yield context, (source, layout, context.reads)

    def _leaving(self, left: tuple[TensorLayout, ...]) -> Iterator[tuple[TensorContext, Between]]:
        for context, layout in zip(self.outputs, left, strict=True):
            for place, target in enumerate(context.reads):
                yield context, (layout, target, context.reads[:place])

    def candidates(self) -> Iterator[dict[str, Axes]]:
        """Cuts to try: axes that all neighbors treat alike cut the same factor, or none.

        First those that follow the neighbors; no cut is among them. Where all factors on all
        such groups of axes are too many, only factors that some neighbor cuts.
        """
        layouts = dict.fromkeys(tensor.layout for tensor in self.moves.shared)
        groups = group_equal_axes(self.mesh, [_uses(layout) for layout in layouts])
        followed = [self._followed(group) for group in groups]
        every = [(*f, *(n for n in self.moves.limits if n not in f)) for f in followed]
        options = every if prod(map(len, every)) <= CANDIDATES else followed
        known = set()
        for chosen in islice(product(*options), CANDIDATES):
            assigned = {
                axis: factor
                for group, factor in zip(groups, chosen, strict=True)
                for axis in group
                if factor is not None
            }
            for preferred in self._orders():
                cuts = self.moves.divisible(assigned, preferred)
                key = tuple(cuts.items())
                if key not in known:
                    known.add(key)
                    yield cuts

    @cached_property
    def moves(self) -> NearbyCuts:
        """The moves of the operator among the layouts that are decided."""
        shared = tuple(
            SharedTensor(context.dims, layout)
            for context in (*self.inputs, *self.outputs)
            for layout in context.decided
        )
        return NearbyCuts(self.mesh, unjoined_limits(self.rule), shared)

    def _followed(self, group: Axes) -> tuple[str | None, ...]:
        """The factors that neighbors cut on the axes of `group`, then none."""
        moves = [move for move in self.moves.matching_neighbors() if group[0] in move]
        return (*dict.fromkeys(move[group[0]] for move in moves), None)

    def _orders(self) -> list[Mapping[str, Axes]]:
        """The orders in which neighbors have the axes of each factor; first: as in the mesh."""
        orders: list[Mapping[str, Axes]] = [{}]
        for tensor in self.moves.shared:
            order = {
                factor: axes
                for factor, axes in zip(tensor.dims, tensor.layout.axes, strict=True)
                if factor is not None and axes
            }
            if order not in orders:
                orders.append(order)
        return orders

    def _changes(self, cuts: Cuts) -> Iterator[dict[str, Axes]]:
        """`cuts` with one axis moved to another factor or taken away."""
        axes = [axis for axis, size in enumerate(self.mesh.device_matrix) if size > 1]
        for move in self.moves.with_one_axis_changed(factor_of_axis(cuts), axes):
            yield self.moves.divisible(move, cuts)
            yield self.moves.divisible(move)


def _uses(layout: TensorLayout) -> dict[int, object]:
    """For each axis that the layout uses the dimension that it cuts, or its state."""
    uses: dict[int, object] = {axis: dim for dim, axes in enumerate(layout.axes) for axis in axes}
    uses.update(dict.fromkeys(layout.partial, "partial"))
    uses.update(dict.fromkeys(layout.varying, "varying"))
    return uses

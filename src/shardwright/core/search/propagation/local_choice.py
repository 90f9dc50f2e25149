"""The cuts of one operator that need the least redistribution to its decided neighbors.

*Redistribution* converts a tensor between the layouts of two operators. It excludes what an
operator communicates for its own cuts: reducing its partial sums, and the gradients of inputs that
it reads replicated. Otherwise an operator behind a product cut along the contracted dim would be
cut in any way that avoids the all-reduce, and no weight would be replicated because of the cost of
its gradient. Ties go to the least reduction of own partial sums, as in MindSpore, which sorts
strategies without redistribution by their own forward communication
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
from shardwright.core.search.decided_layouts import (
    SharedRedistribution,
    TensorContext,
    inner_reductions,
    without_partial,
)
from shardwright.core.search.nearby_cuts import (
    NearbyCuts,
    SharedTensor,
    factor_of_axis,
    group_equal_axes,
    unjoined_limits,
)

MAX_CUTS = 512
"""The largest number of cuts of an operator to compare at once; changes of one axis of the best
follow."""

LocalCost = tuple[int, int, int]
"""Bytes of redistributions, of reducing own partial sums, and of tensors on a device; compared in
this order."""


@dataclass(frozen=True, eq=False)
class LocalProblem:
    """One operator with the decisions of its neighbors.

    Args:
        inputs, outputs: the decisions at each of its tensors.
    """

    op: Op
    rule: ShardingRule
    mesh: DeviceMatrix
    inputs: tuple[TensorContext, ...]
    outputs: tuple[TensorContext, ...]

    def cheapest(self) -> dict[str, Axes]:
        """Return the cuts with the least cost, then the least traffic; the first of equal ones."""
        best = self._cheapest_of(self.enumerate_cuts())
        while True:
            # `best` is the first candidate and wins ties, so that every round but the last
            # decreases the cost.
            improved = self._cheapest_of(chain((best,), self._one_axis_changes(best)))
            if improved == best:
                return best
            best = improved

    def cuts_given_neighbors(self, cuts: dict[str, Axes], forward: bool) -> dict[str, Axes]:
        """Return cuts to replace `cuts` once all neighbors are decided, at no more redistribution.

        Ties go to cuts that match the inputs (or the outputs, if not `forward`). So redistributions
        move along tensors of equal size, to where they may become cheaper.
        """
        current_cost = self.cost(cuts)
        # Without redistributions there is nothing to move.
        if current_cost is None or not current_cost[0]:
            return cuts

        def mismatch(cuts: Cuts) -> int:
            read, written = self.rule.layouts(self.mesh, cuts)
            tensors = (
                self._input_redistributions(read)
                if forward
                else self._output_redistributions(written)
            )
            return sum(context.redistribution(*between) for context, between in tensors)

        best, least = cuts, (current_cost[0], mismatch(cuts), *current_cost[1:])
        for changed in chain(self.enumerate_cuts(), self._one_axis_changes(cuts)):
            cost = self.cost(changed, current_cost)
            if cost is not None and (key := (cost[0], mismatch(changed), *cost[1:])) < least:
                best, least = changed, key
        return best

    def _cheapest_of(self, enumerate_cuts: Iterable[dict[str, Axes]]) -> dict[str, Axes]:
        """The first of the cheapest cuts, with the least traffic.

        Traffic is computed only for ties: it needs redistributions that nothing else does, and the
        search for their steps takes time.
        """
        least: LocalCost | None = None
        equal: list[dict[str, Axes]] = []
        for cuts in enumerate_cuts:
            cost = self.cost(cuts, least)
            if cost is not None and cost != least:
                least, equal = cost, []
            if cost is not None and cuts not in equal:
                equal.append(cuts)
        return equal[0] if len(equal) == 1 else min(equal, key=self.traffic)

    def cost(self, cuts: Cuts, bound: LocalCost | None = None) -> LocalCost | None:
        """Return the cost of cuts given the decided neighbors; None if above `bound`."""
        read, written = self.rule.layouts(self.mesh, cuts)
        tensors = zip((*self.inputs, *self.outputs), (*read, *written), strict=True)
        memory = sum(context.local_bytes(layout) for context, layout in tensors)
        reduction_bytes = sum(
            context.traffic(layout, without_partial(layout), ())
            for context, layout in zip(self.outputs, written, strict=True)
        )
        redistribution = 0
        for context, between in chain(
            self._input_redistributions(read), self._output_redistributions(written)
        ):
            redistribution += context.redistribution(*between)
            # The search for redistribution steps takes most of the time, so costs above the bound
            # end it early.
            if bound is not None and (redistribution, reduction_bytes, memory) > bound:
                return None
        return redistribution, reduction_bytes, memory

    def traffic(self, cuts: Cuts) -> int:
        """Return all bytes that the cuts send, with gradients of parameters."""
        read, written = self.rule.layouts(self.mesh, cuts)
        inner = inner_reductions(self.op, self.rule, self.mesh, cuts)
        sent = sum(size for _, size in inner)
        for context, between in chain(
            self._input_redistributions(read), self._output_redistributions(written)
        ):
            sent += context.traffic(*between)
        return sent

    def _input_redistributions(
        self, read: tuple[TensorLayout, ...]
    ) -> Iterator[tuple[TensorContext, SharedRedistribution]]:
        for context, layout in zip(self.inputs, read, strict=True):
            # A parameter is stored as it is read: `redistribution` counts nothing for it, and
            # `traffic` the reduction of its gradient.
            source = without_partial(layout) if context.is_parameter else context.source
            if source is not None:
                yield context, (source, layout, context.reads)

    def _output_redistributions(
        self, written: tuple[TensorLayout, ...]
    ) -> Iterator[tuple[TensorContext, SharedRedistribution]]:
        for context, layout in zip(self.outputs, written, strict=True):
            for number, target in enumerate(context.reads):
                yield context, (layout, target, context.reads[:number])

    def enumerate_cuts(self) -> Iterator[dict[str, Axes]]:
        """Yield cuts to compare, those that match neighbors first, with no cut among them.

        Axes that all neighbors use equally cut the same factor. If all factors on all groups of
        axes give more than `MAX_CUTS`, only factors that some neighbor cuts.
        """
        layouts = dict.fromkeys(tensor.layout for tensor in self.nearby.shared)
        # Axes that all neighbors use alike are interchangeable; one choice for the group keeps the
        # number of combinations independent of the number of devices.
        groups = group_equal_axes(self.mesh, [_placement_of_axis(layout) for layout in layouts])
        neighbor_factors = [self._neighbor_factors(group) for group in groups]
        all_factors = [
            (*f, *(n for n in self.nearby.limits if n not in f)) for f in neighbor_factors
        ]
        options = all_factors if prod(map(len, all_factors)) <= MAX_CUTS else neighbor_factors
        seen = set()
        for chosen in islice(product(*options), MAX_CUTS):
            assigned = {
                axis: factor
                for group, factor in zip(groups, chosen, strict=True)
                for axis in group
                if factor is not None
            }
            for preferred in self._axis_orders():
                cuts = self.nearby.divisible(assigned, preferred)
                key = tuple(cuts.items())
                if key not in seen:
                    seen.add(key)
                    yield cuts

    @cached_property
    def nearby(self) -> NearbyCuts:
        """The cuts near the layouts of decided neighbors."""
        shared = tuple(
            SharedTensor(context.dims, layout)
            for context in (*self.inputs, *self.outputs)
            for layout in context.known_layouts
        )
        return NearbyCuts(self.mesh, unjoined_limits(self.rule), shared)

    def _neighbor_factors(self, group: Axes) -> tuple[str | None, ...]:
        """The factors that neighbors cut over the axes of `group`, then None for no cut."""
        matching = [factors for factors in self.nearby.matching_neighbors() if group[0] in factors]
        return (*dict.fromkeys(factors[group[0]] for factors in matching), None)

    def _axis_orders(self) -> list[Mapping[str, Axes]]:
        """The orders of axes of each factor in the mesh, then in each neighbor."""
        orders: list[Mapping[str, Axes]] = [{}]
        for tensor in self.nearby.shared:
            order = {
                factor: axes
                for factor, axes in zip(tensor.dims, tensor.layout.axes, strict=True)
                if factor is not None and axes
            }
            if order not in orders:
                orders.append(order)
        return orders

    def _one_axis_changes(self, cuts: Cuts) -> Iterator[dict[str, Axes]]:
        """`cuts` with one axis cutting another factor or none."""
        axes = [axis for axis, size in enumerate(self.mesh.device_matrix) if size > 1]
        for factors in self.nearby.with_one_axis_changed(factor_of_axis(cuts), axes):
            # In the order of axes of the present cuts, then outermost first: where two axes cut one
            # dim, their order decides which layouts match without redistribution.
            yield self.nearby.divisible(factors, cuts)
            yield self.nearby.divisible(factors)


def _placement_of_axis(layout: TensorLayout) -> dict[int, object]:
    """The dim that each axis shards, or "partial" or "varying"."""
    uses: dict[int, object] = {axis: dim for dim, axes in enumerate(layout.axes) for axis in axes}
    uses.update(dict.fromkeys(layout.partial, "partial"))
    uses.update(dict.fromkeys(layout.varying, "varying"))
    return uses

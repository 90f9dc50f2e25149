"""Choose the cuts of one operator that need the least redistribution to its decided neighbors.

*Redistribution* converts a tensor between the layouts of two operators. It excludes the
communication that follows from the cuts of one operator: reducing its partial sums, and the
gradients of inputs that it reads replicated. Including it would penalize every cut of an operator
after a product cut along the contracted dim that does not avoid the all-reduce, and every
replicated weight for the all-reduce of its gradient.

Ties go to the fewest bytes that reduce the operator's own partial sums. MindSpore also sorts
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
    kernel_collectives,
    selection_bytes,
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
"""Maximum number of cuts of an operator to enumerate; the cheapest are then changed on one axis at
a time."""

LocalCost = tuple[int, int, int]
"""Cost of an operator's cuts, compared in this order: communication volume of redistributions and
selections (`selection_bytes`), communication volume of reducing the operator's own partial sums,
and bytes of the operator's inputs and outputs on a device."""


@dataclass(frozen=True, eq=False)
class LocalProblem:
    """The problem of choosing the cuts of one operator, given the layouts at its decided neighbors.

    Args:
        inputs, outputs: inputs and outputs of `op`, with their layouts at decided neighbors.
    """

    op: Op
    rule: ShardingRule
    mesh: DeviceMatrix
    inputs: tuple[TensorContext, ...]
    outputs: tuple[TensorContext, ...]

    def cheapest(self) -> dict[str, Axes]:
        """Return the cheapest cuts; ties go to the least communication volume, then to the first.

        Starts at the cheapest of `enumerate_cuts`, and changes one axis at a time while that
        decreases the cost.
        """
        best = self._cheapest_candidate(self.enumerate_cuts())
        while True:
            # `best` is the first candidate and wins ties, so that every round but the last
            # decreases the cost.
            improved = self._cheapest_candidate(chain((best,), self._change_one_axis_of_cuts(best)))
            if improved == best:
                return best
            best = improved

    def cuts_given_neighbors(self, cuts: dict[str, Axes], forward: bool) -> dict[str, Axes]:
        """Return cuts with at most the redistribution volume of `cuts`, given all neighbors.

        Ties go to cuts that match the inputs (or the outputs, if not `forward`), so that a sweep
        over operators moves a redistribution along tensors of equal size until it becomes cheaper.

        Args:
            cuts: current cuts of the operator.
            forward: whether redistributions are moved towards the outputs of the graph.
        """
        current_cost = self.cost(cuts)
        # Without redistributions no cuts need to change.
        if current_cost is None or not current_cost[0]:
            return cuts

        def mismatched_bytes(cuts: Cuts) -> int:
            inputs, outputs = self.rule.layouts(self.mesh, cuts)
            tensors = (
                self._input_redistributions(inputs)
                if forward
                else self._output_redistributions(outputs)
            )
            return sum(context.redistribution_bytes(*layouts) for context, layouts in tensors)

        best, least_cost = cuts, (current_cost[0], mismatched_bytes(cuts), *current_cost[1:])
        for changed in chain(self.enumerate_cuts(), self._change_one_axis_of_cuts(cuts)):
            cost = self.cost(changed, current_cost)
            if cost is None:
                continue
            # `mismatched_bytes` before the other terms, so that a sweep moves redistributions
            # further.
            key = (cost[0], mismatched_bytes(changed), *cost[1:])
            if key < least_cost:
                best, least_cost = changed, key
        return best

    def _cheapest_candidate(self, candidates: Iterable[dict[str, Axes]]) -> dict[str, Axes]:
        """Return the cheapest of several cuts; ties go to the least communication volume, then to
        the first."""
        least_cost: LocalCost | None = None
        cheapest: list[dict[str, Axes]] = []
        for cuts in candidates:
            cost = self.cost(cuts, least_cost)
            # `cost` gives None above the bound, so a different cost is a lower one.
            if cost is not None and cost != least_cost:
                least_cost, cheapest = cost, []
            if cost is not None and cuts not in cheapest:
                cheapest.append(cuts)
        # The volume is computed only for ties: it needs redistributions that no other cost needs,
        # and the search for their steps takes time.
        return cheapest[0] if len(cheapest) == 1 else min(cheapest, key=self.communication_volume)

    def cost(self, cuts: Cuts, bound: LocalCost | None = None) -> LocalCost | None:
        """Return the cost of `cuts` given the decided neighbors, or None if the cost is above
        `bound`."""
        inputs, outputs = self.rule.layouts(self.mesh, cuts)
        tensors = zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True)
        # The cheap terms first, so that the bound may end the sum over redistributions early.
        memory = sum(context.local_bytes(layout) for context, layout in tensors)
        reduction_bytes = sum(
            context.communication_volume(layout, without_partial(layout), ())
            for context, layout in zip(self.outputs, outputs, strict=True)
        )
        redistribution_bytes = selection_bytes(self.op, self.rule, self.mesh, cuts)
        for context, layouts in chain(
            self._input_redistributions(inputs), self._output_redistributions(outputs)
        ):
            redistribution_bytes += context.redistribution_bytes(*layouts)
            # The search for redistribution steps takes most of the time, so costs above the bound
            # end it early.
            if bound is not None and (redistribution_bytes, reduction_bytes, memory) > bound:
                return None
        return redistribution_bytes, reduction_bytes, memory

    def communication_volume(self, cuts: Cuts) -> int:
        """Return the communication volume per device with `cuts`, in bytes, including gradients of
        parameters and collectives inside the kernel."""
        inputs, outputs = self.rule.layouts(self.mesh, cuts)
        inner = kernel_collectives(self.op, self.rule, self.mesh, cuts)
        sent_bytes = sum(size for _, size in inner)
        for context, layouts in chain(
            self._input_redistributions(inputs), self._output_redistributions(outputs)
        ):
            sent_bytes += context.communication_volume(*layouts)
        return sent_bytes

    def _input_redistributions(
        self, inputs: tuple[TensorLayout, ...]
    ) -> Iterator[tuple[TensorContext, SharedRedistribution]]:
        for context, layout in zip(self.inputs, inputs, strict=True):
            # A parameter is stored as it is read: `redistribution_bytes` counts no bytes for it,
            # and `communication_volume` counts the reduction of its gradient.
            source = without_partial(layout) if context.is_parameter else context.initial_layout
            if source is not None:
                yield context, (source, layout, context.consumer_layouts)

    def _output_redistributions(
        self, outputs: tuple[TensorLayout, ...]
    ) -> Iterator[tuple[TensorContext, SharedRedistribution]]:
        for context, layout in zip(self.outputs, outputs, strict=True):
            for index, target in enumerate(context.consumer_layouts):
                # Steps that several consumers share count at the first of these consumers.
                yield context, (layout, target, context.consumer_layouts[:index])

    def enumerate_cuts(self) -> Iterator[dict[str, Axes]]:
        """Yield at most `MAX_CUTS` different cuts of the operator to compare, including no cut.

        Cuts that match neighbors come first. Axes that all neighbors use equally cut the same
        factor. Factors that no neighbor cuts are tried only if all combinations of factors are at
        most `MAX_CUTS`.
        """
        layouts = dict.fromkeys(tensor.layout for tensor in self.nearby.shared)
        # Axes that all neighbors use equally are interchangeable; one choice for the group keeps
        # the number of combinations independent of the number of devices.
        groups = group_equal_axes(self.mesh, [_placements_by_axis(layout) for layout in layouts])
        neighbor_factors = [self._factors_cut_by_neighbors(group) for group in groups]
        all_factors = [
            (*f, *(n for n in self.nearby.limits if n not in f)) for f in neighbor_factors
        ]
        options = all_factors if prod(map(len, all_factors)) <= MAX_CUTS else neighbor_factors
        yielded = set()
        # Limited here too, as the factors of neighbors alone may have more combinations.
        for chosen in islice(product(*options), MAX_CUTS):
            assigned = {
                axis: factor
                for group, factor in zip(groups, chosen, strict=True)
                for axis in group
                if factor is not None
            }
            # Where two axes cut one dim, their order decides whose layout the operator matches.
            for preferred in self._axis_orders():
                cuts = self.nearby.divisible(assigned, preferred)
                key = tuple(cuts.items())
                if key not in yielded:
                    yielded.add(key)
                    yield cuts

    @cached_property
    def nearby(self) -> NearbyCuts:
        """Generator of cuts of the operator that match the layouts at decided neighbors."""
        shared = tuple(
            SharedTensor(context.dims, layout)
            for context in (*self.inputs, *self.outputs)
            for layout in context.neighbor_layouts
        )
        return NearbyCuts(self.mesh, unjoined_limits(self.rule), shared)

    def _factors_cut_by_neighbors(self, axes: Axes) -> tuple[str | None, ...]:
        """Return the factors of this operator that match a neighbor's cut over `axes`, then None.

        Each neighbor cuts the same dim over all of `axes`; None stands for no cut.
        """
        # All axes have one placement in each neighbor's layout, so the first stands for all.
        matching = [factors for factors in self.nearby.matching_neighbors() if axes[0] in factors]
        return (*dict.fromkeys(factors[axes[0]] for factors in matching), None)

    def _axis_orders(self) -> list[Mapping[str, Axes]]:
        """Return orders in which the axes of a factor are assigned, each a dict from factor to
        axes: {} for outermost first, then the order of each neighbor's layout."""
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

    def _change_one_axis_of_cuts(self, cuts: Cuts) -> Iterator[dict[str, Axes]]:
        """Yield `cuts` with one axis changed to another factor, or to none."""
        axes = [axis for axis, size in enumerate(self.mesh.device_matrix) if size > 1]
        for factors in self.nearby.with_one_axis_changed(factor_of_axis(cuts), axes):
            # Axes in the order of the present cuts, then outermost first: where two axes cut one
            # dim, their order decides which layouts match without redistribution.
            yield self.nearby.divisible(factors, cuts)
            yield self.nearby.divisible(factors)


def _placements_by_axis(layout: TensorLayout) -> dict[int, object]:
    """Return a dict from axis to the dim that it shards, "partial" or "varying"; axes over which
    `layout` is replicated are missing."""
    placements: dict[int, object] = {
        axis: dim for dim, axes in enumerate(layout.axes) for axis in axes
    }
    placements.update(dict.fromkeys(layout.partial, "partial"))
    placements.update(dict.fromkeys(layout.varying, "varying"))
    return placements

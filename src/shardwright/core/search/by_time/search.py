"""The double recursion by seconds: axis after axis, and on each axis all operators together.

On each axis the choices with the least cost are found exactly by variable elimination. Then each
axis is decided again with all others known, and single operators over all axes, until nothing is
gained; in between axes are exchanged: one gets the choices of another, of data parallel, or none.
What counts is the step's time on a cluster, and `mem_coeff` for the parameters that a device keeps:
a byte kept counts as `mem_coeff` bytes sent over the fastest link.

Gradients of parameters are reduced while the backward pass computes, so that only what exceeds it
counts: max(0, G - B), which is the largest of λ (G - B) over 0 ≤ λ ≤ 1. Parameters that are stored
sharded are gathered likewise while the forward pass computes. The search is made for
λ = 0, which is right if gradients then do not exceed the backward pass, else for larger values.
Of what is hidden the cluster's slowdown counts; where devices share a processor, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter

from shardwright.core.cost.step_time import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.axis_tables import AxisTables, Choices, Weights
from shardwright.core.search.by_time.elimination import Table
from shardwright.core.search.by_time.local_search import local_search
from shardwright.core.search.by_time.log_costs import log_costs
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost
from shardwright.core.search.by_time.problem import SearchProblem, search_problem
from shardwright.core.search.by_time.swap_axes import swap_axes
from shardwright.core.search.cut_moves import axes_of_factors
from shardwright.core.search.indexed_graph import NO_CUT
from shardwright.core.search.request import CutsOfGraph, Pricing, SearchRequest
from shardwright.errors import StrategyError
from shardwright.progress import OnShare, ignore_share, subrange, track

ROUNDS = 4
"""At most so many times all axes, then all operators, are decided again."""

SHARES = (0.0, 0.25)
"""The values of λ, as long as gradients exceed the backward pass. Larger ones have not found better
plans for language models on 64 to 1024 devices."""

NEAR = 1.1
"""What takes more than so many times the least is not improved operator by operator: the prediction
of a whole plan knows more than what is minimized here, but not so much."""

GAIN = 1e-9
"""Relative; less is none."""


def searches_by_time(request: SearchRequest) -> list[CutsOfGraph]:
    """Decides what every operator cuts on every axis by the seconds of a step.

    Returns:
        The cheapest cuts and, if different, the cheapest without exchanging axes; the full
        predictor picks one.

    Raises:
        StrategyError: if the request has no pricing.
        ConfigError: if the cluster has fewer devices than the mesh and its pipeline stages.
    """
    search = timed_search(request)
    found = search.found(request.on_share)
    if request.log_costs:
        log_costs(search.problem, search.objective, search.axes, found[0], search.weights(0.0))
    return [cuts_of_graph(request.graph, search.problem, cuts) for cuts in found]


def timed_search(request: SearchRequest, fold: bool = True) -> TimedSearch:
    """The search that answers a request. Raises: as `searches_by_time`.

    Args:
        fold: whether blocks that repeat are decided once.
    """
    pricing = request.pricing
    if pricing is None:
        raise StrategyError("a search by seconds needs a cluster: the request has no pricing")
    problem = search_problem(request.graph, request.pinned, request.outputs, request.arrivals, fold)
    weight = pricing.parameter_weight(request.mem_coeff)
    model = TimeModel(pricing.cluster, request.mesh, pricing.stages, pricing.sharing, weight)
    return TimedSearch(
        problem, model, pricing, pricing.seconds_per_parameter_byte(request.mem_coeff)
    )


def cuts_of_graph(graph: Graph, problem: SearchProblem, cuts: Sequence[Cuts]) -> CutsOfGraph:
    """The cuts of each operator, from those of the variables."""
    by_op = {op.name: cuts[n] for op, n in zip(graph.ops, problem.variable_of, strict=True)}
    return {
        name: {factor: tuple(axes) for factor, axes in cut.items() if axes}
        for name, cut in by_op.items()
        if any(cut.values())
    }


@dataclass
class TimedSearch:
    """The search on one problem; what it tabulates serves all its passes.

    Args:
        seconds_per_parameter_byte: seconds that a byte of parameters counts which a device keeps.
    """

    problem: SearchProblem
    model: TimeModel
    pricing: Pricing
    seconds_per_parameter_byte: float
    tables: dict[object, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objective = Objective(self.problem, self.model)
        self.axes = [a for a, size in enumerate(self.model.mesh.device_matrix) if size > 1]

    @property
    def shares(self) -> tuple[float, ...]:
        """The values of λ that are tried."""
        return (1.0,) if self.model.shared else SHARES

    def best(self, on_share: OnShare = ignore_share) -> list[Cuts]:
        """The cuts of each variable with the least total that is found."""
        return self.found(on_share)[0]

    def found(self, on_share: OnShare = ignore_share) -> list[list[Cuts]]:
        """The cuts of each variable, of the passes alone and after axes were exchanged; those with
        the least total first.

        Args:
            on_share: what ends early counts as done: of λ that are not tried, and of passes.
        """
        # A part for the recursion, one for each of two that are improved operator by operator, and
        # one for swaps of axes.
        first, *each, last = (subrange(on_share, number, 4) for number in range(4))
        totals: list[tuple[float, list[Cuts]]] = []
        for cuts, share in zip(self._recursive(first), each, strict=False):
            local_search(self.objective, cuts, self.total, ROUNDS, GAIN, share)
            if all(cuts != others for _, others in totals):
                totals.append((self.total(self.objective.cost(cuts)), cuts))
        totals.sort(key=itemgetter(0))
        self._swap(totals[0][1], last)
        on_share(1.0)
        return [cuts for _, cuts in totals]

    def _recursive(self, on_share: OnShare) -> list[list[Cuts]]:
        """The best that the recursion finds for any λ and order of axes, and without exchanges of
        axes if that is near."""
        orders, (first, *larger) = self._orders(), self.shares
        ways = [(first, order) for order in orders] + [(share, orders[0]) for share in larger]
        alone: list[tuple[float, list[Cuts]]] = []
        exchanged: list[tuple[float, list[Cuts]]] = []
        exposes = False
        for number, (share, order) in enumerate(ways):
            if share > first and not exposes:
                break
            decided = self._decide(share, order, subrange(on_share, number, len(ways)))
            costs = [self.objective.cost(cuts) for cuts in decided]
            alone.append((self.total(costs[0]), decided[0]))
            exchanged.append((self.total(costs[-1]), decided[-1]))
            exposes = exposes or any(cost.exposed for cost in costs)
        least, best = min(exchanged, key=itemgetter(0))
        other, cuts = min(alone, key=itemgetter(0))
        near = cuts != best and other < NEAR * least
        return [list(best), list(cuts)] if near else [list(best)]

    def _swap(self, cuts: list[Cuts], on_share: OnShare) -> None:
        """Swaps axes for some operators, and improves what that has changed."""
        exposed = self.objective.cost(cuts).exposed > 0
        weights = self.weights(1.0 if exposed or self.model.shared else 0.0)
        swaps, after = (subrange(on_share, number, 2) for number in range(2))
        if swap_axes(self.objective, cuts, self.total, weights, swaps):
            local_search(self.objective, cuts, self.total, ROUNDS, GAIN, after)

    def _orders(self) -> list[list[int]]:
        """In which axes are decided: from the slowest links to the fastest, and where links are
        equal from the outermost to the innermost axis or the other way around. An outer axis is the
        more significant one wherever both cut a dimension, so that neither is always better."""
        levels = self.model.links.levels
        inwards = sorted(self.axes, key=lambda axis: -levels[axis][0][0])
        outwards = sorted(self.axes, key=lambda axis: (-levels[axis][0][0], -axis))
        return [inwards] if inwards == outwards else [inwards, outwards]

    def _decide(self, share: float, order: Sequence[int], on_share: OnShare) -> list[list[Cuts]]:
        """The recursion for one λ and one order of axes with the passes that improve it; then, if
        that costs less, after axes were exchanged."""
        choices = self._start()
        first, passes, exchanges, more = (subrange(on_share, number, 4) for number in range(4))
        for axis in track(order, first):
            self._redecide(choices, axis, share)
        # The last axis is fresh.
        total = self.total(self._cost(choices))
        best = self._settle(choices, share, total, passes, settled={*order[-1:]})
        decided = [self._cuts(choices)]
        if self._exchange(choices, best, exchanges):
            self._settle(choices, share, self.total(self._cost(choices)), more)
            decided.append(self._cuts(choices))
        return decided

    def _settle(
        self,
        choices: Choices,
        share: float,
        best: float,
        on_share: OnShare,
        settled: Set[int] = frozenset(),
    ) -> float:
        """Decides axes again until nothing is gained; what it costs then.

        Args:
            settled: axes that were decided since any other has changed: that gives the same again.
        """
        for number in range(ROUNDS):
            before = best
            known = set()
            for axis in track(self.axes, subrange(on_share, number, ROUNDS)):
                # Of axes that are alike in all things it is enough to try one.
                alike = (self.model.links.levels[axis], tuple(row[axis] for row in choices))
                if axis in settled or alike in known:
                    continue
                known.add(alike)
                total = self._improve(choices, axis, share, best)
                settled = {axis} if total < best else settled | {axis}
                best = total
            if best >= before * (1 - GAIN):
                break
        return best

    def _exchange(self, choices: Choices, best: float, on_share: OnShare) -> bool:
        """Gives an axis the choices of another one, those of data parallel, or none, if that costs
        less: what every operator gains only if all others do likewise is found by no smaller
        step."""
        before, nothing = best, (NO_CUT,) * len(choices)
        known: set[object] = set()
        for axis in track(self.axes, on_share):
            alike = self.model.links.levels[axis], tuple(row[axis] for row in choices)
            if alike in known:
                continue
            known.add(alike)
            columns = {tuple(row[other] for row in choices) for other in self.axes}
            columns |= {
                self.problem.data_parallel_choices(self.model.mesh.device_matrix[axis]),
                nothing,
            }
            for column in sorted(columns - {tuple(row[axis] for row in choices)}):
                changed = self._with_column(choices, axis, column)
                cost = self._cost_below(changed, best)
                if cost is not None:
                    choices[:], best = changed, self.total(cost)
        return best < before

    def _with_column(self, choices: Choices, axis: int, column: Sequence[int]) -> Choices:
        """The choices with those of one axis in its place, where sizes allow."""
        sizes = self.model.mesh.device_matrix
        changed: Choices = []
        for variable, row, choice in zip(self.problem.variables, choices, column, strict=True):
            shard_counts = variable.op_type.shard_counts(row, sizes, axis)
            divides = choice != NO_CUT and variable.op_type.divides(
                choice, shard_counts, sizes[axis]
            )
            fresh = row[axis] if variable.pinned is not None else choice if divides else NO_CUT
            changed.append([*row[:axis], fresh, *row[axis + 1 :]])
        return changed

    def _start(self) -> Choices:
        """No cuts, but those that are pinned."""
        choices = []
        for variable in self.problem.variables:
            row = [NO_CUT] * len(self.model.mesh.device_matrix)
            for factor, axes in (variable.pinned or {}).items():
                for axis in axes:
                    row[axis] = variable.op_type.factors.index(factor)
            choices.append(row)
        return choices

    def _redecide(self, choices: Choices, axis: int, share: float) -> None:
        decisions = AxisTables(
            self.problem, self.model, axis, choices, self.weights(share), self.tables
        ).decide(self.problem.eliminations)
        for row, choice in zip(choices, decisions, strict=True):
            row[axis] = choice

    def _improve(self, choices: Choices, axis: int, share: float, best: float) -> float:
        """Decides one axis again, and keeps that if it costs less over all axes."""
        before = [row[axis] for row in choices]
        self._redecide(choices, axis, share)
        if [row[axis] for row in choices] == before:
            return best
        cost = self._cost_below(choices, best)
        if cost is not None:
            return self.total(cost)
        for row, choice in zip(choices, before, strict=True):
            row[axis] = choice
        return best

    def weights(self, share: float) -> Weights:
        """What counts how much, if `share` of what may be hidden is not."""
        times = self.pricing.micro_batches
        slowdown = self.model.slowdown
        hides = (1 - slowdown) * share
        gathers = 0.0 if self.model.sharing is None else hides
        return Weights(
            times - gathers, times - hides, times, slowdown + hides, self.seconds_per_parameter_byte
        )

    def _cuts(self, choices: Choices) -> list[Cuts]:
        cuts: list[Cuts] = []
        for variable, row in zip(self.problem.variables, choices, strict=True):
            names = variable.op_type.factors
            decided = axes_of_factors({a: names[c] for a, c in enumerate(row) if c != NO_CUT})
            # Axes of a pinned operator may stand in another order.
            cuts.append(decided if variable.pinned is None else variable.pinned)
        return cuts

    def _cost(self, choices: Choices) -> ObjectiveCost:
        return self.objective.cost(self._cuts(choices))

    def _cost_below(self, choices: Choices, best: float) -> ObjectiveCost | None:
        """The cost of choices; None if nothing is gained over `best`."""
        return self.objective.cost_below(self._cuts(choices), self.total, best * (1 - GAIN))

    def cost(self, cuts: Mapping[str, Cuts]) -> ObjectiveCost:
        """Of operators that are cut so, by name; of blocks that repeat as in the first."""
        return self.objective.cost([cuts.get(v.op.name, {}) for v in self.problem.variables])

    def total(self, cost: ObjectiveCost) -> float:
        """What the search minimizes."""
        return cost.total(
            self.pricing.micro_batches, self.seconds_per_parameter_byte, self.model.slowdown
        )

"""The search by time: minimize the seconds of a training step on a cluster, axis by axis.

1. Decide one axis after another, each exactly by variable elimination, in two orders of axes.
2. Decide each axis again given all others, until the objective stops decreasing.
3. Try the choices of another axis, data parallelism, or no cuts on each axis; then repeat step 2.
4. Improve single operators over all axes (`local_search`).
5. Swap two axes for subsets of operators (`swap_axes`), then repeat step 4.

The objective is formula (1) of `core.search`. Its term E is not linear: gradients are reduced while
the backward pass computes, so that only max(0, Gr - W) counts. This term is the maximum of
λ (Gr - W) over 0 ≤ λ ≤ 1, and for a fixed λ the objective is a sum over operators and edges. λ = 0
is exact as long as no communication is exposed; if the result exposes some, larger λ are searched
too. Gathers of parameters in the forward pass have the same form and use the same λ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter

from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.axis_tables import AxisTables, Choices, Weights
from shardwright.core.search.by_time.elimination import Table
from shardwright.core.search.by_time.local_search import local_search
from shardwright.core.search.by_time.log_costs import log_costs
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost
from shardwright.core.search.by_time.problem import SearchProblem, search_problem
from shardwright.core.search.by_time.swap_axes import swap_axes
from shardwright.core.search.indexed_graph import NO_CUT
from shardwright.core.search.nearby_cuts import axes_of_factors
from shardwright.core.search.request import CutsOfGraph, SearchRequest, TimedStep
from shardwright.errors import StrategyError
from shardwright.progress import OnShare, ignore_share, subrange, track

MAX_ROUNDS = 4
"""Maximum number of rounds in which all axes are decided again, and of rounds of local search."""

EXPOSED_SHARES = (0.0, 0.25)
"""Values of λ with which the linear objective is minimized; the second only if the first leaves
communication exposed. Larger values found no better plans for language models on 64 to 1024
devices."""

MAX_COST_RATIO = 1.1
"""Limit of the ratio between the objectives of the second and the best cuts that a search returns.
Predicted step times of full plans may rank cuts within this ratio differently."""

MIN_GAIN = 1e-9
"""Minimum relative decrease of the objective for a change to be applied; above rounding errors."""


def candidates_by_time(request: SearchRequest) -> list[CutsOfGraph]:
    """Decide the cuts of all operators by the time of a training step.

    Returns:
        The cheapest cuts and, if different and nearly as cheap, the cheapest before the search
        copied all choices of one axis to another; the predictor of full plans picks one.

    Raises:
        StrategyError: if the request has no cluster, so that its costs are not in seconds.
        ConfigError: if the cluster has fewer devices than the mesh and its pipeline stages.
    """
    search = timed_search(request)
    results = search.run(request.on_share)
    if request.log_costs:
        log_costs(search.problem, search.objective, search.axes, results[0], search.weights(0.0))
    return [cuts_of_graph(request.graph, search.problem, cuts) for cuts in results]


def timed_search(request: SearchRequest, fold: bool = True) -> TimedSearch:
    """Return a search that minimizes predicted seconds, without running it.

    Args:
        fold: whether repeated blocks share variables.

    Raises:
        StrategyError: if `request` has no cluster, so that its costs are not in seconds.
        ConfigError: if the cluster has fewer devices than the mesh and its pipeline stages.
    """
    timed_step = request.timed_step
    if timed_step is None:
        raise StrategyError(
            "a search by seconds needs a cluster: the request has no cluster\n"
            "set it, as in SearchRequest(graph, mesh, timed_step=TimedStep(cluster))"
        )
    problem = search_problem(request.graph, request.pinned, request.outputs, request.arrivals, fold)
    weight = timed_step.parameter_weight(request.mem_coeff)
    model = TimeModel(
        timed_step.cluster, request.mesh, timed_step.stages, timed_step.optimizer_shard_size, weight
    )
    return TimedSearch(
        problem, model, timed_step, timed_step.seconds_per_parameter_byte(request.mem_coeff)
    )


def cuts_of_graph(graph: Graph, problem: SearchProblem, cuts: Sequence[Cuts]) -> CutsOfGraph:
    """Return the cuts of each operator, by name, given the cuts of each variable; operators without
    cuts are omitted."""
    by_op = {op.name: cuts[n] for op, n in zip(graph.ops, problem.variable_of, strict=True)}
    return {
        name: {factor: tuple(axes) for factor, axes in op_cuts.items() if axes}
        for name, op_cuts in by_op.items()
        if any(op_cuts.values())
    }


@dataclass
class TimedSearch:
    """Search for the cuts of one problem, with cost tables cached across all steps of the search.

    Args:
        seconds_per_parameter_byte: weight of a byte of parameters on a device, in seconds.
        tables: cached cost tables of all axes.
    """

    problem: SearchProblem
    model: TimeModel
    timed_step: TimedStep
    seconds_per_parameter_byte: float
    tables: dict[object, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objective = Objective(self.problem, self.model)
        self.axes = [a for a, size in enumerate(self.model.mesh.device_matrix) if size > 1]

    @property
    def exposed_shares(self) -> tuple[float, ...]:
        """Values of λ in the linear objective to search with, in this order."""
        # Devices that share a processor hide no communication: with a slowdown of 1, λ drops out of
        # the objective.
        return (1.0,) if self.model.shares_processor else EXPOSED_SHARES

    def best(self, on_share: OnShare = ignore_share) -> list[Cuts]:
        """Run the search, and return the cuts of each variable with the lowest objective."""
        return self.run(on_share)[0]

    def run(self, on_share: OnShare = ignore_share) -> list[list[Cuts]]:
        """Return the best cuts of each variable and, if different and nearly as cheap, the best
        before copying choices between axes (`_copy_choices_between_axes`).

        The cuts with the lowest objective come first.

        Args:
            on_share: called with the completed fraction, which jumps when a phase ends early.
        """
        recursion_part, *local_search_parts, swap_part = (
            subrange(on_share, index, 4) for index in range(4)
        )
        totals: list[tuple[float, list[Cuts]]] = []
        # Not strict: there are one or two results.
        for cuts, local_search_part in zip(
            self._search_all_orders(recursion_part), local_search_parts, strict=False
        ):
            local_search(self.objective, cuts, self.total, MAX_ROUNDS, MIN_GAIN, local_search_part)
            # Local search may end at the same cuts from both starts; equal cuts are returned once.
            if all(cuts != earlier_cuts for _, earlier_cuts in totals):
                totals.append((self.total(self.objective.cost(cuts)), cuts))
        # By the objective alone, as cuts are dicts and cannot be compared.
        totals.sort(key=itemgetter(0))
        # Only the best cuts, which stay the best: a change is kept only if it lowers the objective.
        self._improve_by_axis_swaps(totals[0][1], swap_part)
        on_share(1.0)
        return [cuts for _, cuts in totals]

    def _search_all_orders(self, on_share: OnShare) -> list[list[Cuts]]:
        """Search with each λ and each order of axes.

        Returns:
            The best cuts and, if different and nearly as cheap, the best before copying choices
            between axes (`_copy_choices_between_axes`).
        """
        orders, (smallest, *larger) = self._axis_orders(), self.exposed_shares
        # Larger λ with the first order only, as each run takes as long as the first run.
        runs = [(smallest, order) for order in orders] + [
            (exposed_share, orders[0]) for exposed_share in larger
        ]
        without_copies: list[tuple[float, list[Cuts]]] = []
        with_copies: list[tuple[float, list[Cuts]]] = []
        is_exposed = False
        for run_index, (exposed_share, order) in enumerate(runs):
            # Without exposed communication λ = 0 was exact.
            if exposed_share > smallest and not is_exposed:
                break
            results = self._search_in_order(
                exposed_share, order, subrange(on_share, run_index, len(runs))
            )
            costs = [self.objective.cost(cuts) for cuts in results]
            # A single result where copying choices gained nothing.
            without_copies.append((self.total(costs[0]), results[0]))
            with_copies.append((self.total(costs[-1]), results[-1]))
            is_exposed = is_exposed or any(cost.exposed for cost in costs)
        least_total, best_cuts = min(with_copies, key=itemgetter(0))
        other_total, other_cuts = min(without_copies, key=itemgetter(0))
        is_near = other_cuts != best_cuts and other_total < MAX_COST_RATIO * least_total
        return [list(best_cuts), list(other_cuts)] if is_near else [list(best_cuts)]

    def _improve_by_axis_swaps(self, cuts: list[Cuts], on_share: OnShare) -> None:
        """Swap axes in `cuts`, in place; if any swap helps, improve single operators afterwards."""
        is_exposed = self.objective.cost(cuts).exposed > 0
        # λ at the present cuts: 1 where communication is exposed, 0 where it is hidden.
        weights = self.weights(1.0 if is_exposed or self.model.shares_processor else 0.0)
        swap_part, local_search_part = (subrange(on_share, index, 2) for index in range(2))
        # Without a swap local search would start from the cuts at which it has ended before.
        if swap_axes(self.objective, cuts, self.total, weights, swap_part):
            local_search(self.objective, cuts, self.total, MAX_ROUNDS, MIN_GAIN, local_search_part)

    def _axis_orders(self) -> list[list[int]]:
        """Return one or two orders in which axes are decided: from the slowest to the fastest
        links, with axes of equal links outermost first, then innermost first.

        Where two axes cut one dim, the outer axis is more significant, which decides the layouts
        that a neighbor can read without redistribution. So neither order is always better.
        """
        levels = self.model.links.levels
        # An axis that crosses several levels counts as the fastest of them.
        inwards = sorted(self.axes, key=lambda axis: -levels[axis][0][0])
        outwards = sorted(self.axes, key=lambda axis: (-levels[axis][0][0], -axis))
        return [inwards] if inwards == outwards else [inwards, outwards]

    def _search_in_order(
        self, exposed_share: float, order: Sequence[int], on_share: OnShare
    ) -> list[list[Cuts]]:
        """Search with one λ and one order of axes: decide each axis, decide each axis again, and
        copy choices between axes.

        Returns:
            The cuts before copying choices between axes and, if copying decreases the objective,
            those after it.
        """
        # Pins are neighbors of all other operators from the first axis on.
        choices = self._pinned_choices()
        decide_part, refine_part, copy_part, second_refine_part = (
            subrange(on_share, index, 4) for index in range(4)
        )
        for axis in track(order, decide_part):
            self._decide_axis(choices, axis, exposed_share)
        # The last axis was decided given all others, so deciding it again changes nothing.
        total = self.total(self._compute_cost_of_choices(choices))
        best = self._redecide_axes(
            choices, exposed_share, total, refine_part, up_to_date={*order[-1:]}
        )
        results = [self._convert_choices_to_cuts(choices)]
        # All axes are decided again then, as copies may have changed several of them.
        if self._copy_choices_between_axes(choices, best, copy_part):
            self._redecide_axes(
                choices,
                exposed_share,
                self.total(self._compute_cost_of_choices(choices)),
                second_refine_part,
            )
            results.append(self._convert_choices_to_cuts(choices))
        return results

    def _redecide_axes(
        self,
        choices: Choices,
        exposed_share: float,
        best_total: float,
        on_share: OnShare,
        up_to_date: Set[int] = frozenset(),
    ) -> float:
        """Decide axes again until the objective stops decreasing, and return the objective.

        Args:
            up_to_date: axes that were decided after the last change of any other axis; deciding
                them again would give the same choices.
        """
        for round_index in range(MAX_ROUNDS):
            previous_total = best_total
            decided_properties = set()
            for axis in track(self.axes, subrange(on_share, round_index, MAX_ROUNDS)):
                # Axes with equal links and choices get equal results.
                properties = (self.model.links.levels[axis], tuple(row[axis] for row in choices))
                # Deciding an axis takes most of the time of a search, so axes with a known result
                # are skipped.
                if axis in up_to_date or properties in decided_properties:
                    continue
                decided_properties.add(properties)
                total = self._redecide_axis_if_cheaper(choices, axis, exposed_share, best_total)
                # A change on this axis makes the results of all others outdated.
                up_to_date = {axis} if total < best_total else up_to_date | {axis}
                best_total = total
            if best_total >= previous_total * (1 - MIN_GAIN):
                break
        return best_total

    def _copy_choices_between_axes(
        self, choices: Choices, best_total: float, on_share: OnShare
    ) -> bool:
        """Replace the choices on an axis by those on another axis, by data parallelism or by no
        cuts, where that decreases the objective.

        The step escapes local minima in which no operator gains unless all other operators change
        too.

        Returns:
            Whether `choices` changed.
        """
        initial_total, no_cuts = best_total, (NO_CUT,) * len(choices)
        tried_properties: set[object] = set()
        for axis in track(self.axes, on_share):
            properties = self.model.links.levels[axis], tuple(row[axis] for row in choices)
            if properties in tried_properties:
                continue
            tried_properties.add(properties)
            columns = {tuple(row[other_axis] for row in choices) for other_axis in self.axes}
            columns |= {
                self.problem.data_parallel_choices(self.model.mesh.device_matrix[axis]),
                no_cuts,
            }
            # Sorted, since the order of a set differs between runs, and each change is the start of
            # the next.
            for column in sorted(columns - {tuple(row[axis] for row in choices)}):
                changed = self._replace_choices_on_axis(choices, axis, column)
                cost = self._compute_cost_if_below(changed, best_total)
                if cost is not None:
                    choices[:], best_total = changed, self.total(cost)
        return best_total < initial_total

    def _replace_choices_on_axis(
        self, choices: Choices, axis: int, axis_choices: Sequence[int]
    ) -> Choices:
        """Return `choices` with the choices on `axis` replaced by `axis_choices`.

        `NO_CUT` replaces a choice whose size is not divisible; pinned operators keep their choice.
        """
        sizes = self.model.mesh.device_matrix
        changed: Choices = []
        for variable, row, choice in zip(
            self.problem.variables, choices, axis_choices, strict=True
        ):
            shard_counts = variable.op_type.shard_counts(row, sizes, axis)
            divides = choice != NO_CUT and variable.op_type.divides(
                choice, shard_counts, sizes[axis]
            )
            # The sizes of this operator may not be divisible by a copied choice, as other axes cut
            # them too.
            new_choice = row[axis] if variable.pinned is not None else choice if divides else NO_CUT
            changed.append([*row[:axis], new_choice, *row[axis + 1 :]])
        return changed

    def _pinned_choices(self) -> Choices:
        """Return the choices of pinned operators on all axes, and `NO_CUT` for all other
        operators."""
        choices = []
        for variable in self.problem.variables:
            row = [NO_CUT] * len(self.model.mesh.device_matrix)
            for factor, axes in (variable.pinned or {}).items():
                for axis in axes:
                    row[axis] = variable.op_type.factors.index(factor)
            choices.append(row)
        return choices

    def _decide_axis(self, choices: Choices, axis: int, exposed_share: float) -> None:
        decisions = AxisTables(
            self.problem, self.model, axis, choices, self.weights(exposed_share), self.tables
        ).decide(self.problem.eliminations)
        for row, choice in zip(choices, decisions, strict=True):
            row[axis] = choice

    def _redecide_axis_if_cheaper(
        self, choices: Choices, axis: int, exposed_share: float, best_total: float
    ) -> float:
        """Decide one axis again, restore its choices unless the objective decreases, and return the
        objective.

        The tables of one axis only approximate redistributions over several axes.
        """
        previous_choices = [row[axis] for row in choices]
        self._decide_axis(choices, axis, exposed_share)
        # Spares the objective, which takes longer to compute than to compare the choices.
        if [row[axis] for row in choices] == previous_choices:
            return best_total
        cost = self._compute_cost_if_below(choices, best_total)
        if cost is not None:
            return self.total(cost)
        for row, choice in zip(choices, previous_choices, strict=True):
            row[axis] = choice
        return best_total

    def weights(self, exposed_share: float) -> Weights:
        """Return the weights of the linear objective for a fraction of exposed communication.

        Weights are the coefficients in m F + (1 - s) λ (Ga - F) + s Ga, where s is the slowdown by
        overlapped communication: the weight of F is m - (1 - s) λ and the weight of Ga is s + (1 -
        s) λ. The weights of W and Gr follow from the same formula.

        Args:
            exposed_share: λ, the fraction of the seconds by which the communication of parameters
                exceeds the computation that hides it.
        """
        micro_batches = self.timed_step.micro_batches
        slowdown = self.model.slowdown
        exposed_weight = (1 - slowdown) * exposed_share
        # Without sharded storage (ZeRO) no parameters are gathered in the forward pass, so that it
        # hides no communication.
        gather_weight = 0.0 if self.model.optimizer_shard_size is None else exposed_weight
        return Weights(
            micro_batches - gather_weight,
            micro_batches - exposed_weight,
            micro_batches,
            slowdown + exposed_weight,
            self.seconds_per_parameter_byte,
        )

    def _convert_choices_to_cuts(self, choices: Choices) -> list[Cuts]:
        cuts: list[Cuts] = []
        for variable, row in zip(self.problem.variables, choices, strict=True):
            names = variable.op_type.factors
            decided = axes_of_factors({a: names[c] for a, c in enumerate(row) if c != NO_CUT})
            # A pin may list the axes of a factor in any order of significance.
            cuts.append(decided if variable.pinned is None else variable.pinned)
        return cuts

    def _compute_cost_of_choices(self, choices: Choices) -> ObjectiveCost:
        return self.objective.cost(self._convert_choices_to_cuts(choices))

    def _compute_cost_if_below(self, choices: Choices, best_total: float) -> ObjectiveCost | None:
        """Return the cost of `choices`, or None if the objective is not below `best_total`
        seconds."""
        return self.objective.cost_below(
            self._convert_choices_to_cuts(choices), self.total, best_total * (1 - MIN_GAIN)
        )

    def cost(self, cuts: Mapping[str, Cuts]) -> ObjectiveCost:
        """Return the cost of the model, given the cuts of each operator, by name.

        A variable of several operators takes the cuts of its first operator.
        """
        return self.objective.cost([cuts.get(v.op.name, {}) for v in self.problem.variables])

    def total(self, cost: ObjectiveCost) -> float:
        """Return the seconds that the search minimizes, for a given `ObjectiveCost`."""
        return cost.total(
            self.timed_step.micro_batches, self.seconds_per_parameter_byte, self.model.slowdown
        )

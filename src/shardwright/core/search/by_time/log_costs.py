"""Log the costs of the search by time in the format of the symbolic search."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.axis_tables import Weights
from shardwright.core.search.by_time.objective import Objective
from shardwright.core.search.by_time.problem import SearchProblem
from shardwright.core.search.cost_log import CutAlternative, log_choice
from shardwright.core.search.indexed_graph import NO_CUT
from shardwright.core.search.nearby_cuts import axes_of_factors, factor_of_axis

logger = logging.getLogger("shardwright.search")


def log_costs(
    problem: SearchProblem,
    objective: Objective,
    axes: Sequence[int],
    cuts: Sequence[Cuts],
    weights: Weights,
) -> None:
    """Log for each main operator the weighted seconds of each choice, with all other choices fixed.

    Main operators are those with a symbolic cost model. Repeated blocks are logged once.

    Args:
        axes: the axes to log.
        cuts: the axes of each factor of each variable.
    """
    edges_around = problem.edges_around()
    mesh = objective.model.mesh
    for index, variable in enumerate(problem.variables):
        # The operators that the symbolic search logs, so that the two logs can be compared.
        if not variable.op_type.is_main or variable.pinned is not None:
            continue
        op_type, current_factors = variable.op_type, factor_of_axis(cuts[index])
        for axis in axes:
            alternatives: list[CutAlternative] = []
            for factor in (*op_type.choices, NO_CUT):
                other_axes = {a: f for a, f in current_factors.items() if a != axis}
                on_axis = {} if factor == NO_CUT else {axis: op_type.factors[factor]}
                new_cuts = axes_of_factors({**other_axes, **on_axis})
                limits = dict(zip(op_type.factors, op_type.limits, strict=True))
                # The search did not have choices that sizes are not divisible by.
                if any(limits[f] % mesh.size(over) for f, over in new_cuts.items()):
                    continue
                all_cuts = [*cuts[:index], new_cuts, *cuts[index + 1 :]]
                label = (
                    "no_cut" if factor == NO_CUT else op_type.labels[op_type.choices.index(factor)]
                )
                # Of one block, without the number of its repetitions: the log is about single
                # operators.
                redistribution_seconds = sum(
                    weights.weighted_seconds(objective.edge(edge, all_cuts))
                    for edge in edges_around[index]
                )
                operator_seconds = weights.weighted_seconds(objective.operator(variable, new_cuts))
                alternatives.append(
                    CutAlternative(factor, label, operator_seconds, redistribution_seconds)
                )
            current_factor = current_factors.get(axis)
            chosen = [
                each
                for each in alternatives
                if (None if each.factor == NO_CUT else op_type.factors[each.factor])
                == current_factor
            ]
            # A cut factor without a label, such as `ring`, is not among the logged choices.
            if chosen:
                size = mesh.device_matrix[axis]
                log_choice(logger.info, variable.op.name, axis, size, alternatives, chosen[0], " s")

"""Log the cost of each choice of an operator in the wording of MindSpore's log.

MindSpore's tutorials explain how to read this log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.core.cost.symbolic import IMPOSSIBLE
from shardwright.core.search.indexed_graph import NO_CUT


@dataclass(frozen=True, slots=True)
class CutAlternative:
    """A choice of an operator on one axis, with its cost.

    Args:
        factor: index of the factor in `OpType.factors`, or `NO_CUT`.
        label: name of the factor in the log, such as `I-axis`.
        operator_cost, redistribution_cost: seconds, or symbolic costs.
    """

    factor: int
    label: str
    operator_cost: float
    redistribution_cost: float

    @property
    def total(self) -> float:
        return self.operator_cost + self.redistribution_cost


def log_choice(
    log: Callable[[str], None],
    name: str,
    axis: int,
    axis_size: int,
    alternatives: Sequence[CutAlternative],
    chosen: CutAlternative,
    unit: str = "",
) -> None:
    """Log the cost of each alternative, and which alternative is chosen.

    Args:
        log: function that logs one line.
        name: name of the operator.
        axis: index of the axis, from 0.
        axis_size: number of devices along the axis.
        unit: text after each cost, such as " s"; empty for symbolic costs.
    """
    log(f"{name}, level {axis + 1} ({axis_size} devices along the axis)")
    for each in alternatives:
        # As in MindSpore: an impossible choice has no line of its own, and is the largest float in
        # the list of costs below.
        if each.operator_cost < IMPOSSIBLE:
            condition = (
                "If do NOT cut the axis" if each.factor == NO_CUT else f"If the {each.label} is cut"
            )
            log(
                f"{condition}, the op-cost is {each.operator_cost:.6g}{unit}, the rest-cost is"
                f" {each.redistribution_cost:.6g}{unit}, and the total cost is"
                f" {each.total:.6g}{unit}"
            )
    labels = "/".join(each.label for each in alternatives)
    totals = ", ".join(f"{each.total:.6g}{unit}" for each in alternatives)
    log(f"The costs of cutting the {labels} are : {{{totals}}}")
    log("Choose NOT to cut" if chosen.factor == NO_CUT else f"The {chosen.label} is chosen")

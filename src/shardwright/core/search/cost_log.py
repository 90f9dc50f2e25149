"""What each choice of an operator costs, in the words of MindSpore's log, which tutorials teach how
to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.core.cost.symbolic import IMPOSSIBLE
from shardwright.core.search.indexed_graph import NO_CUT


@dataclass(frozen=True, slots=True)
class CutAlternative:
    """One choice of one operator on one axis, as it is logged."""

    factor: int
    label: str
    operator: float
    redistribution: float

    @property
    def total(self) -> float:
        return self.operator + self.redistribution


def log_choice(
    log: Callable[[str], None],
    name: str,
    axis: int,
    axis_size: int,
    alternatives: Sequence[CutAlternative],
    chosen: CutAlternative,
    unit: str = "",
) -> None:
    """Writes what each alternative costs, and which one is chosen.

    Args:
        unit: of the costs; empty for symbolic ones.
    """
    log(f"{name}, level {axis + 1} ({axis_size} devices along the axis)")
    for one in alternatives:
        if one.operator < IMPOSSIBLE:
            condition = (
                "If do NOT cut the axis" if one.factor == NO_CUT else f"If the {one.label} is cut"
            )
            log(
                f"{condition}, the op-cost is {one.operator:.6g}{unit}, the redist-cost is"
                f" {one.redistribution:.6g}{unit}, and the total cost is {one.total:.6g}{unit}"
            )
    labels = "/".join(one.label for one in alternatives)
    totals = ", ".join(f"{one.total:.6g}{unit}" for one in alternatives)
    log(f"The costs of cutting the {labels} are : {{{totals}}}")
    log("Choose NOT to cut" if chosen.factor == NO_CUT else f"The {chosen.label} is chosen")

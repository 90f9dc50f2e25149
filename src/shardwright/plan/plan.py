"""The result of planning: its data, with the text and the files that are made of it.

Search writes plans, lowering reads them, and neither knows the other. A plan is saved as JSON,
printed as a table and explained operator by operator, without the model.
"""

from __future__ import annotations

from pathlib import Path

from shardwright.constraints.strategy_file import strategies_to_text
from shardwright.errors import PlanError
from shardwright.graph.graph import Graph
from shardwright.plan.data import PlanData, dtype_name, target_text
from shardwright.plan.describe import dump, explanation
from shardwright.plan.json import plan_fields, plan_to_json
from shardwright.plan.strategies import strategies
from shardwright.plan.table import plan_text


class Plan(PlanData):
    """Everything decided for one model on a number of devices; see `PlanData` for its fields."""

    def explain(self, name: str) -> str:
        """How the operator `name` is cut, where its inputs come from and what they cost."""
        return explanation(self, self.row(name))

    def __str__(self) -> str:
        return plan_text(self)

    def text(self, every: bool = False) -> str:
        """The table; with `every` also operators that only follow their neighbors."""
        return plan_text(self, every)

    def dump(self) -> str:
        """Everything that was decided, and what follows from it, as text: each operator with its
        strategy, the layouts of its inputs and outputs, the conversions and their bytes, and how
        parameters are stored. Equal plans have equal dumps."""
        return dump(self)

    def to_json(self) -> str:
        """The plan as JSON text; it holds everything but the captured graph."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: if the text is no plan, or one of another version.
        """
        return cls(**plan_fields(text, where))

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that was saved.

        Raises:
            PlanError: if the file is missing or holds no plan of this version.
        """
        if not Path(path).is_file():
            raise PlanError(f"{path}: there is no such file")
        return cls.from_json(Path(path).read_text(), str(path))

    def save_strategies(self, path: str | Path) -> None:
        """Writes how every operator is cut as a file that people can edit.

        `load_strategies` pins a model accordingly. What was pinned is written as it was said; else
        counts where they say it all (if the plan has its graph), layouts where they do not.
        """
        Path(path).write_text(strategies_to_text(strategies(self)), encoding="utf-8")

    def check_fits(self, graph: Graph) -> None:
        """Raises:
        PlanError: if `graph` is not the model that the plan was made for; says what differs.
        """
        if graph.fingerprint == self.fingerprint:
            return
        raise PlanError(
            f"the plan was made for another model (fingerprint {self.fingerprint}, "
            f"this one has {graph.fingerprint}): {_difference(self, graph)}; plan this model"
        )


def _difference(plan: Plan, graph: Graph) -> str:
    """The first thing in which the plan's model and `graph` differ."""
    mine = {v.name: (v.shape, dtype_name(v)) for v in graph.parameters}
    for name, entry in plan.parameters.items():
        if name not in mine:
            return f"it has no parameter {name!r}"
        if mine[name] != entry:
            return f"parameter {name!r} is {mine[name]}, planned as {entry}"
    extra = [name for name in mine if name not in plan.parameters]
    if extra:
        return f"parameter {extra[0]!r} is not in the plan"
    for index, (row, op) in enumerate(zip(plan.operators, graph.ops, strict=False)):
        if row.name != op.name or row.operator != target_text(op):
            return (
                f"operator {index} is {op.name!r} ({target_text(op)}), "
                f"planned as {row.name!r} ({row.operator})"
            )
        shapes = tuple(v.shape for v in op.outputs)
        if shapes != row.outputs:
            return f"operator {op.name!r} gives {shapes}, planned as {row.outputs}"
    if len(plan.operators) != len(graph.ops):
        return f"it has {len(graph.ops)} operators, planned {len(plan.operators)}"
    return "its operators have other arguments"

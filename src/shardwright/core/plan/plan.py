"""The result of planning: its data, its text and its files.

The search writes plans, lowering reads them, and neither depends on the other. A plan is saved as
JSON, printed as a table and explained operator by operator, all without the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib import import_module
from pathlib import Path

from shardwright.core.constraints.strategy_file import strategies_to_text
from shardwright.core.graph.graph import Graph
from shardwright.core.plan.data import PlanData, dtype_name, target_text
from shardwright.core.plan.describe import dump, explanation
from shardwright.core.plan.measured import Measured
from shardwright.core.plan.plan_file import plan_from_json, plan_to_json
from shardwright.core.plan.strategies import strategies
from shardwright.core.plan.table import plan_text
from shardwright.core.rules import rule_of
from shardwright.errors import PlanError
from shardwright.text_files import read_text

NOTEBOOK = 120
"""Columns of a cell."""


class Plan(PlanData):
    """Everything decided for one model on a number of devices; see `PlanData` for its fields."""

    def explain(self, name: str) -> str:
        """How the operator `name` is sharded, where its inputs come from and what they cost.

        Raises:
            PlanError: if the plan has no operator of that name.
        """
        return explanation(self, self.row(name))

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        """The summary, where a notebook shows a plan."""
        return f"<pre>{escape(plan_text(self, width=NOTEBOOK))}</pre>"

    def text(self, full: bool = False, every: bool = False) -> str:
        """The summary of `print(plan)`, or the full table: a row for each operator that does more
        than to follow its neighbors, repeated blocks as one; `every` includes those that follow."""
        return plan_text(self, full, every)

    def dump(self) -> str:
        """The whole plan as text: each operator with its strategy, the layouts of its inputs and
        outputs, redistributions and their bytes, and the storage of parameters. Equal plans have
        equal dumps."""
        return dump(self)

    def to_json(self, memory: bool = False) -> str:
        """The plan as JSON, without the captured graph.

        Args:
            memory: also predict what memory each stage needs, by a dry run if the plan has its
                graph, what other choices would cost, and how far the best plan is at most, so that
                all can be read from the file.
        """
        if not memory:
            return plan_to_json(self)
        known = {"saved_memory": self.known_memory, "saved_choices": self.choices, "gap": self.gap}
        return plan_to_json(self, **known)

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: if the text is not a plan, or one of another version.
        """
        return plan_from_json(cls, text, where)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, with the memory that it needs."""
        Path(path).write_text(self.to_json(memory=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a saved plan.

        Raises:
            PlanError: if the file does not exist or is not a plan of this version.
        """
        return cls.from_json(read_text(path, PlanError), str(path))

    def report(
        self,
        path: str | Path,
        others: Mapping[str, PlanData | str] | None = None,
        measured: Measured | None = None,
    ) -> None:
        """Writes the plan as a page for a browser: one HTML file that needs no network.

        Args:
            others: plans to compare it with, by name, or why there is none.
            measured: steps of it that `shardwright train --profile` has profiled.

        Raises:
            PlanError: if jinja2 is not installed, the plan has stages that its schedule cannot
                run, or another plan was measured.
        """
        # Loaded when it is called: the page belongs to the tools, which the core works without.
        import_module("shardwright.tools.report").write_page(self, path, others, measured)

    def save_strategies(self, path: str | Path) -> None:
        """Writes the strategy of every operator to a file that people can edit.

        `load_strategies` pins a model accordingly. Pinned operators are written as the user pinned
        them; others as counts of shards where these suffice (which a plan with its graph can
        tell), otherwise as layouts.
        """
        Path(path).write_text(strategies_to_text(strategies(self)), encoding="utf-8")

    def check_fits(self, graph: Graph) -> None:
        """Raises:
        PlanError: if `graph` is not the model that the plan was made for, or has operators or
            parameters that cannot be sharded so; names the first.
        """
        if graph.fingerprint == self.fingerprint:
            misfit = next(_misfits(self, graph), None)
            if misfit is not None:
                raise PlanError(f"the plan does not fit the model: {misfit}")
            return
        raise PlanError(
            f"the plan was made for another model (its fingerprint is {self.fingerprint}, this "
            f"model's is {graph.fingerprint}): {_difference(self, graph)}; plan this model"
        )


def _misfits(plan: Plan, graph: Graph) -> Iterator[str]:
    """What of the plan's decisions the rules of the model's operators do not allow."""
    mesh = plan.mesh
    if {value.name for value in graph.parameters} != set(plan.storage):
        yield "its parameters are others"
    for op in graph.ops:
        rule = rule_of(op)
        for factor, axes in plan.cuts.get(op.name, {}).items():
            if rule is None or factor not in rule.factors:
                yield f"operator {op.name!r} has no factor {factor!r} that can be cut"
            elif rule.capacity[factor] % mesh.size(axes):
                yield (
                    f"operator {op.name!r}: {mesh.size(axes)} shards of {factor!r} do not divide"
                    f" {rule.capacity[factor]}"
                )
        if rule is not None and rule.too_many(mesh, plan.cuts.get(op.name, {})):
            yield f"operator {op.name!r} is cut by two factors that together do not divide it"
        for axes_of_each, value in zip(plan.outputs.get(op.name, ()), op.outputs, strict=False):
            if axes_of_each is not None and len(axes_of_each) != len(value.shape):
                yield f"the output of operator {op.name!r} has {len(value.shape)} dimensions"


def _difference(plan: Plan, graph: Graph) -> str:
    """The first difference between the plan's model and `graph`."""
    parameters = {v.name: (v.shape, dtype_name(v)) for v in graph.parameters}
    for name, planned in plan.parameters.items():
        if name not in parameters:
            return f"the model has no parameter {name!r}"
        if parameters[name] != planned:
            return f"parameter {name!r} is {parameters[name]}, in the plan {planned}"
    extra = [name for name in parameters if name not in plan.parameters]
    if extra:
        return f"the plan has no parameter {extra[0]!r}"
    for index, (row, op) in enumerate(zip(plan.operators, graph.ops, strict=False)):
        if row.name != op.name or row.operator != target_text(op):
            return (
                f"operator {index} is {op.name!r} ({target_text(op)}), "
                f"in the plan {row.name!r} ({row.operator})"
            )
        shapes = tuple(v.shape for v in op.outputs)
        if shapes != row.outputs:
            return f"operator {op.name!r} returns {shapes}, in the plan {row.outputs}"
    if len(plan.operators) != len(graph.ops):
        return f"the model has {len(graph.ops)} operators, the plan {len(plan.operators)}"
    return "operators have other arguments"

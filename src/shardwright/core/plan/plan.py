"""`sw.Plan`: the result of planning, as data, as text and as a file.

The search produces plans and lowering consumes them, so neither imports the other. A plan can be
saved as JSON, printed as a table and explained operator by operator, all without the model.
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
from shardwright.core.runtime.counted_calls import watch_rank
from shardwright.errors import PlanError, printable
from shardwright.text_files import read_text, write_text

NOTEBOOK_WIDTH = 120
"""Width of a plan in a notebook cell in characters, as notebooks do not report their width."""


class Plan(PlanData):
    """The sharding of one model on a number of devices; `PlanData` documents the fields."""

    def explain(self, name: str) -> str:
        """Explain an operator's sharding, the reasons, and the cost of its redistributions.

        Args:
            name: the operator's name in the plan, such as `layers.0.attn.q`.

        Raises:
            PlanError: if the plan has no operator of that name.
        """
        # Names may come from a plan file, and could control the terminal.
        return printable(explanation(self, self.row(name)))

    def __str__(self) -> str:
        return printable(plan_text(self))

    def _repr_html_(self) -> str:
        """Return the summary as HTML, for Jupyter."""
        # Escaped, as names could be markup.
        return f"<pre>{escape(plan_text(self, width=NOTEBOOK_WIDTH))}</pre>"

    def text(self, full: bool = False, every: bool = False) -> str:
        """Return the plan as text; by default the summary that `print(plan)` shows.

        Args:
            full: whether to return the table of operators instead. Operators of repeated blocks
                share one row; operators that follow their neighbors' sharding without communication
                are left out.
            every: whether to return the table including the operators that `full` leaves out.
        """
        return printable(plan_text(self, full, every))

    def dump(self) -> str:
        """Return all decisions of the plan as text that is equal for equal plans.

        Contains each operator's strategy, input and output layouts, redistributions with their
        bytes, and the storage layout of each parameter.
        """
        return dump(self)

    def to_json(self, memory: bool = False) -> str:
        """Return the plan as JSON, without the captured graph.

        Args:
            memory: whether to include results that a plan without its graph cannot compute: the
                predicted memory of each stage (by a dry run), the costs of alternative shardings,
                and the optimality gap.
        """
        # A dry run takes a second or two, so what depends on one is optional.
        if not memory:
            return plan_to_json(self)
        # Keyed as in the file, where the gap has no prefix `saved_`.
        derived = {
            "saved_memory": self.known_memory,
            "saved_choices": self.choices,
            "gap": self.gap,
        }
        return plan_to_json(self, **derived)

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Read a plan from the JSON of `to_json`.

        Args:
            text: the JSON text.
            where: name of the text's source in errors, such as the path of the file.

        Raises:
            PlanError: if the text is not a plan of this file version, or its fields contradict each
                other.
        """
        return plan_from_json(cls, text, where)

    def save(self, path: str | Path) -> None:
        """Save the plan as JSON, with predicted memory, alternative shardings and optimality gap.

        Args:
            path: the file to write.
        """
        write_text(path, self.to_json(memory=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Load a plan from a file. `graph` is None until `parallelize` captures the model.

        Args:
            path: a file that `save` has written.

        Raises:
            PlanError: if the file does not exist or is not a plan of this file version.
        """
        # A rank that then calls `parallelize` alone learns where this one waits.
        watch_rank()
        return cls.from_json(read_text(path, PlanError), str(path))

    def report(
        self,
        path: str | Path,
        others: Mapping[str, PlanData | str] | None = None,
        measured: Measured | None = None,
    ) -> None:
        """Write the plan as one self-contained HTML file.

        Args:
            path: the file to write.
            others: plans to compare with, by name, or the reason why there is no plan of that name.
            measured: profiled steps of this plan, from `shardwright train --profile`.

        Raises:
            PlanError: if jinja2 is not installed, the schedule cannot run the plan's number of
                stages, or `measured` belongs to another plan.
        """
        # Imported here because `core` must import and run without the optional `tools`.
        import_module("shardwright.tools.report").write_page(self, path, others, measured)

    def save_strategies(self, path: str | Path) -> None:
        """Write the strategy of every operator to an editable file, which `load_strategies` reads.

        Pinned operators keep the user's strategy. Other operators are written as numbers of shards
        per dimension if the numbers resolve to the same sharding, otherwise as layouts. The check
        needs the graph; without a graph, all sharded operators are written as layouts.

        Args:
            path: the file to write.
        """
        write_text(path, strategies_to_text(strategies(self)))

    def check_fits(self, graph: Graph) -> None:
        """Check that the plan was made for the model of `graph`, and that its sharding is valid.

        Args:
            graph: the captured model.

        Raises:
            PlanError: if the plan was made for another model, or for the first operator whose cuts
                contradict its sharding rule.
        """
        # An edited plan file may contradict the rules of the same model, which the fingerprint does
        # not show.
        if graph.fingerprint == self.fingerprint:
            problem = next(_describe_invalid_decisions(self, graph), None)
            if problem is not None:
                raise PlanError(
                    f"the plan does not match the model: {problem}\nplan the model again"
                )
            return
        raise PlanError(
            f"the plan was made for another model: {_describe_first_model_difference(self, graph)}"
            f" (the plan's fingerprint is {self.fingerprint}, this model's is {graph.fingerprint})"
            "\nmake a plan of this model with `sw.plan`"
        )


def _describe_invalid_decisions(plan: Plan, graph: Graph) -> Iterator[str]:
    """Yield a description of each decision of `plan` that the sharding rules do not allow.

    An edited plan file may contain such decisions, as the fingerprint covers only the model.
    """
    mesh = plan.mesh
    # Reading a file compares `storage` with the `parameters` of the file only.
    if {value.name for value in graph.parameters} != set(plan.storage):
        yield "`storage` does not list the model's parameters"
    for op in graph.ops:
        rule = rule_of(op)
        for factor, axes in plan.cuts.get(op.name, {}).items():
            if rule is None or factor not in rule.factors:
                yield f"operator {op.name!r} has no factor {factor!r} that can be sharded"
            elif rule.capacity[factor] % mesh.size(axes):
                yield (
                    f"operator {op.name!r}: factor {factor!r} of size {rule.capacity[factor]} is"
                    f" not divisible into {mesh.size(axes)} shards"
                )
        if rule is not None and rule.indivisible_factor(mesh, plan.cuts.get(op.name, {})):
            yield (
                f"operator {op.name!r}: two factors shard one dimension, which the product of their"
                " shard counts does not divide"
            )
        for axes_of_each, value in zip(plan.outputs.get(op.name, ()), op.outputs, strict=False):
            if axes_of_each is not None and len(axes_of_each) != len(value.shape):
                yield (
                    f"operator {op.name!r}: an output has {len(value.shape)} dimensions in the"
                    f" model, but {len(axes_of_each)} in `outputs`"
                )


def _describe_first_model_difference(plan: Plan, graph: Graph) -> str:
    """Describe the first difference in parameters, else in operators, between the plan's model and
    `graph`."""
    parameters = {v.name: (v.shape, dtype_name(v)) for v in graph.parameters}
    for name, planned in plan.parameters.items():
        if name not in parameters:
            return f"the model has no parameter {name!r}"
        if parameters[name] != planned:
            return f"parameter {name!r} is {parameters[name]} in the model, {planned} in the plan"
    missing_in_plan = [name for name in parameters if name not in plan.parameters]
    if missing_in_plan:
        return f"the plan has no parameter {missing_in_plan[0]!r}"
    # The first difference says more than a difference in number, which is compared last.
    for index, (row, op) in enumerate(zip(plan.operators, graph.ops, strict=False)):
        if row.name != op.name or row.operator != target_text(op):
            return (
                f"operator {index} is {op.name!r} ({target_text(op)}) in the model, "
                f"{row.name!r} ({row.operator}) in the plan"
            )
        shapes = tuple(v.shape for v in op.outputs)
        if shapes != row.outputs:
            return f"operator {op.name!r} returns {shapes} in the model, {row.outputs} in the plan"
    if len(plan.operators) != len(graph.ops):
        return f"the model has {len(graph.ops)} operators, the plan {len(plan.operators)}"
    # Plan files do not store constant arguments (dims, eps, scales); the fingerprint covers them.
    return "an operator has different arguments"

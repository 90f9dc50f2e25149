"""List the differences between two plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.repeated_rows import fold_names
from shardwright.core.plan.rows import OperatorRow, is_notable, seconds_text

NONE, PRESENT = "-", "present"


@dataclass(frozen=True)
class Difference:
    """One property in which two plans differ.

    Args:
        what: name of the property, such as `step time`, `cuts`, `stage`, …
        first, second: value in each plan; `-` if a plan does not have the property.
        names: names of the operators or parameters that differ, with ranges of numbers for repeated
            blocks; empty for a property of the plan itself.
    """

    what: str
    first: str
    second: str
    names: tuple[str, ...] = ()


def differences(first: PlanData, second: PlanData, every: bool = False) -> list[Difference]:
    """List the differences between two plans: properties of the plans, then of operators and
    parameters.

    Args:
        first, second: the plans to compare.
        every: whether to include cuts of operators that copy their neighbors' cuts without
            communication.
    """
    return [
        *(
            Difference(what, value, other)
            # Both plans have all properties in one order, with `-` for those that do not apply.
            for (what, value), (_, other) in zip(
                _iterate_plan_properties(first), _iterate_plan_properties(second), strict=True
            )
            if value != other
        ),
        *_join_equal_differences(_compare_operators(first, second, every)),
        *_join_equal_differences(_compare_stored_shard_counts(first, second)),
    ]


def _iterate_plan_properties(plan: PlanData) -> Iterator[tuple[str, str]]:
    step, pipeline = plan.step, plan.pipeline
    # The fingerprint covers the model, not how it is sharded.
    yield "model", plan.fingerprint
    yield "devices", f"{plan.devices}"
    yield "mode", plan.mode
    yield "options", plan.options_text or NONE
    yield "stages", f"{pipeline.stages}"
    # Of one stage no schedule has an effect.
    yield "schedule", pipeline.schedule if pipeline.stages > 1 else NONE
    yield "micro-batches", f"{pipeline.micro_batches}"
    yield "global batch", NONE if plan.global_batch is None else f"{plan.global_batch}"
    yield "sharding", NONE if plan.sharding is None else plan.sharding.level
    yield "cluster", NONE if step is None else step.cluster
    yield "step time", NONE if step is None else seconds_text(step.seconds)
    yield "pipeline bubbles", NONE if step is None else f"{step.bubble:.1%}"
    yield "sent forward", bytes_text(plan.forward_bytes)
    yield "sent backward", bytes_text(plan.backward_bytes)
    yield "parameters stored", bytes_text(plan.parameter_bytes)
    yield "operators recomputed", f"{sum(bool(row.segment) for row in plan.operators)}"


ComparedPair = tuple[str, str, str, str]
"""(Operator or parameter name, property name, value in the first plan, value in the second
plan)."""


def _compare_operators(first: PlanData, second: PlanData, every: bool) -> Iterator[ComparedPair]:
    # Axis names are comparable only on equal meshes; otherwise numbers of shards are compared.
    show_axes = first.mesh == second.mesh
    staged = first.pipeline.stages > 1 or second.pipeline.stages > 1
    first_rows = {row.name: row for row in first.operators}
    second_rows = {row.name: row for row in second.operators}
    # Operators of both plans, in the order of the first.
    for name in {**first_rows, **second_rows}:
        row, other = first_rows.get(name), second_rows.get(name)
        if row is None or other is None:
            first_has, second_has = (NONE if each is None else PRESENT for each in (row, other))
            yield name, "operator", first_has, second_has
            continue
        # Operators that follow their neighbors differ wherever these do.
        if every or is_notable(row) or is_notable(other):
            yield (
                name,
                "cuts",
                _describe_cuts(first, row, show_axes),
                _describe_cuts(second, other, show_axes),
            )
        if staged:
            yield name, "stage", f"{row.stage}", f"{other.stage}"
        yield (
            name,
            "recomputed",
            _describe_recomputation_of_row(row),
            _describe_recomputation_of_row(other),
        )


def _describe_cuts(plan: PlanData, row: OperatorRow, show_axes: bool) -> str:
    """List each sharded factor with its mesh axes (`k/tp`) or, without `show_axes`, its number of
    shards (`k/2`)."""
    sizes = dict(zip(plan.mesh.alias_names, plan.mesh.device_matrix, strict=True))
    cuts = (
        f"{factor}/{'·'.join(axes) if show_axes else prod(sizes[axis] for axis in axes)}"
        for factor, axes in row.cuts.items()
    )
    return ", ".join(cuts) or "none"


def _describe_recomputation_of_row(row: OperatorRow) -> str:
    return "yes" if row.segment else "no"


def _compare_stored_shard_counts(first: PlanData, second: PlanData) -> Iterator[ComparedPair]:
    """Yield, for each parameter that both plans have, a comparison of its stored shards per dim."""
    for name in first.storage:
        # The line `model` has told already that one model lacks a parameter of the other.
        if name in second.storage:
            yield (
                name,
                "storage",
                _describe_stored_shard_counts(first, name),
                _describe_stored_shard_counts(second, name),
            )


def _describe_stored_shard_counts(plan: PlanData, name: str) -> str:
    # Numbers of shards, as the meshes of the plans may differ; a scalar has none.
    return "·".join(str(plan.mesh.size(axes)) for axes in plan.storage[name]) or "1"


def _join_equal_differences(comparisons: Iterable[ComparedPair]) -> Iterator[Difference]:
    """Yield one `Difference` for all operators or parameters with an equal property and equal pair
    of values; skip pairs of equal values."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, what, value, other in comparisons:
        if value != other:
            groups.setdefault((what, value, other), []).append(name)
    # Groups of one property together; the stable sort keeps the order of the model within each.
    properties = list(dict.fromkeys(what for what, _, _ in groups))
    by_property = sorted(groups.items(), key=lambda group: properties.index(group[0][0]))
    for (what, value, other), names in by_property:
        yield Difference(what, value, other, tuple(fold_names(names)))

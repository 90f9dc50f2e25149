"""The differences between two plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from shardwright.core.cost.memory import binary
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.repeated_rows import fold_names
from shardwright.core.plan.rows import OperatorRow, is_notable, seconds_text

NONE, PRESENT = "-", "present"


@dataclass(frozen=True)
class Difference:
    """One property in which two plans differ.

    Args:
        what: the property: `step time`, `cuts`, `stage`, …
        first, second: its value in each plan; `-` in a plan that does not have it.
        names: of the operators or parameters, repeated blocks as one; empty for a property of the
            whole plan.
    """

    what: str
    first: str
    second: str
    names: tuple[str, ...] = ()


def differences(first: PlanData, second: PlanData, every: bool = False) -> list[Difference]:
    """The differences, from the whole plan to single operators; empty if the plans make the same
    decisions.

    Args:
        every: also compare the cuts of operators that only follow their neighbors.
    """
    return [
        *(
            Difference(what, one, other)
            for (what, one), (_, other) in zip(_whole(first), _whole(second), strict=True)
            if one != other
        ),
        *_of_names(_operators(first, second, every)),
        *_of_names(_storage(first, second)),
    ]


def _whole(plan: PlanData) -> Iterator[tuple[str, str]]:
    """The properties of a whole plan."""
    step, pipeline = plan.step, plan.pipeline
    yield "model", plan.fingerprint
    yield "devices", f"{plan.devices}"
    yield "mode", plan.mode
    yield "options", plan.options_text or NONE
    yield "stages", f"{pipeline.stages}"
    yield "schedule", pipeline.schedule if pipeline.stages > 1 else NONE
    yield "micro-batches", f"{pipeline.micro_batches}"
    yield "global batch", NONE if plan.global_batch is None else f"{plan.global_batch}"
    yield "sharding", NONE if plan.sharding is None else plan.sharding.level
    yield "cluster", NONE if step is None else step.cluster
    yield "step time", NONE if step is None else seconds_text(step.seconds)
    yield "pipeline bubbles", NONE if step is None else f"{step.bubble:.1%}"
    yield "sent forward", binary(plan.forward_bytes)
    yield "sent backward", binary(plan.backward_bytes)
    yield "parameters stored", binary(plan.parameter_bytes)
    yield "operators recomputed", f"{sum(bool(row.segment) for row in plan.operators)}"


ComparedPair = tuple[str, str, str, str]
"""A name, a property, and its value in the first and in the second plan."""


def _operators(first: PlanData, second: PlanData, every: bool) -> Iterator[ComparedPair]:
    names = first.mesh == second.mesh
    staged = first.pipeline.stages > 1 or second.pipeline.stages > 1
    first_rows = {row.name: row for row in first.operators}
    second_rows = {row.name: row for row in second.operators}
    for name in {**first_rows, **second_rows}:
        one, other = first_rows.get(name), second_rows.get(name)
        if one is None or other is None:
            first_has, second_has = (NONE if row is None else PRESENT for row in (one, other))
            yield name, "operator", first_has, second_has
            continue
        if every or is_notable(one) or is_notable(other):
            yield name, "cuts", _cuts(first, one, names), _cuts(second, other, names)
        if staged:
            yield name, "stage", f"{one.stage}", f"{other.stage}"
        yield name, "recomputed", _recomputed(one), _recomputed(other)


def _cuts(plan: PlanData, row: OperatorRow, names: bool) -> str:
    """Each factor with its axes, or where the plans' axes differ with its number of shards."""
    sizes = dict(zip(plan.mesh.alias_names, plan.mesh.device_matrix, strict=True))
    cuts = (
        f"{factor}/{'·'.join(axes) if names else prod(sizes[axis] for axis in axes)}"
        for factor, axes in row.cuts.items()
    )
    return ", ".join(cuts) or "none"


def _recomputed(row: OperatorRow) -> str:
    return "yes" if row.segment else "no"


def _storage(first: PlanData, second: PlanData) -> Iterator[ComparedPair]:
    """The number of shards in which each dimension of a parameter is stored."""
    for name in first.storage:
        if name in second.storage:
            yield name, "storage", _shards(first, name), _shards(second, name)


def _shards(plan: PlanData, name: str) -> str:
    return "·".join(str(plan.mesh.size(axes)) for axes in plan.storage[name]) or "1"


def _of_names(comparisons: Iterable[ComparedPair]) -> Iterator[Difference]:
    """Equal differences as one, with all names that they apply to."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, what, one, other in comparisons:
        if one != other:
            groups.setdefault((what, one, other), []).append(name)
    kinds = list(dict.fromkeys(what for what, _, _ in groups))
    by_kind = sorted(groups.items(), key=lambda group: kinds.index(group[0][0]))
    for (what, one, other), names in by_kind:
        yield Difference(what, one, other, tuple(fold_names(names)))

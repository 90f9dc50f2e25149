"""What two plans decide otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from shardwright.cost.memory import binary
from shardwright.plan.data import PlanData
from shardwright.plan.repeated_rows import folded_names
from shardwright.plan.rows import OperatorRow, is_notable, seconds_text

NONE, THERE = "-", "there"


@dataclass(frozen=True)
class Difference:
    """Something that differs.

    Args:
        what: `step`, `cuts`, `stage`, …
        first, second: as it is in the one plan and in the other; `-` where it is in only one.
        names: of the operators or parameters, of equal blocks as one; empty if it is about the
            whole plan.
    """

    what: str
    first: str
    second: str
    names: tuple[str, ...] = ()


def differences(first: PlanData, second: PlanData, every: bool = False) -> list[Difference]:
    """What differs, from the whole to the single operator; nothing if the plans decide the same.

    Args:
        every: also of operators that only follow their neighbors.
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
    """What is said of a plan in one word."""
    step, pipeline = plan.step, plan.pipeline
    yield "model", plan.fingerprint
    yield "devices", f"{plan.devices}"
    yield "mode", plan.mode
    yield "options", ", ".join(f"{key}={value}" for key, value in plan.options.items()) or NONE
    yield "stages", f"{pipeline.stages}"
    yield "schedule", pipeline.schedule if pipeline.stages > 1 else NONE
    yield "micro-batches", f"{pipeline.micro_batches}"
    yield "global batch", NONE if plan.global_batch is None else f"{plan.global_batch}"
    yield "sharding", NONE if plan.sharding is None else plan.sharding.level
    yield "cluster", NONE if step is None else step.cluster
    yield "time of a step", NONE if step is None else seconds_text(step.seconds)
    yield "bubbles", NONE if step is None else f"{step.bubble:.1%}"
    yield "sent forward", binary(plan.forward_bytes)
    yield "sent backward", binary(plan.backward_bytes)
    yield "parameters kept", binary(plan.parameter_bytes)
    yield "computed again", f"{sum(bool(row.segment) for row in plan.operators)} operators"


Found = tuple[str, str, str, str]
"""A name, what differs of it, and how it is in the one and in the other."""


def _operators(first: PlanData, second: PlanData, every: bool) -> Iterator[Found]:
    letters = first.mesh == second.mesh
    staged = first.pipeline.stages > 1 or second.pipeline.stages > 1
    ours = {row.name: row for row in first.operators}
    theirs = {row.name: row for row in second.operators}
    for name in {**ours, **theirs}:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            yield name, "operator", NONE if one is None else THERE, NONE if other is None else THERE
            continue
        if every or is_notable(one) or is_notable(other):
            yield name, "cuts", _cuts(first, one, letters), _cuts(second, other, letters)
        if staged:
            yield name, "stage", f"{one.stage}", f"{other.stage}"
        yield name, "computed", _computed(one), _computed(other)


def _cuts(plan: PlanData, row: OperatorRow, letters: bool) -> str:
    """By the axes, or where these are others in the two plans by the number of parts."""
    sizes = dict(zip(plan.mesh.alias_names, plan.mesh.device_matrix, strict=True))
    said = (
        f"{factor}/{''.join(axes) if letters else prod(sizes[axis] for axis in axes)}"
        for factor, axes in row.cuts.items()
    )
    return ", ".join(said) or "whole"


def _computed(row: OperatorRow) -> str:
    return "again" if row.segment else "once"


def _storage(first: PlanData, second: PlanData) -> Iterator[Found]:
    """Into how many parts each dimension of a parameter is cut where it is stored."""
    for name in first.storage:
        if name in second.storage:
            yield name, "stored in", _parts(first, name), _parts(second, name)


def _parts(plan: PlanData, name: str) -> str:
    return "·".join(str(plan.mesh.size(axes)) for axes in plan.storage[name]) or "1"


def _of_names(found: Iterable[Found]) -> Iterator[Difference]:
    """What differs alike as one, under all names of which it is so."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, what, one, other in found:
        if one != other:
            groups.setdefault((what, one, other), []).append(name)
    kinds = list(dict.fromkeys(what for what, _, _ in groups))
    by_kind = sorted(groups.items(), key=lambda group: kinds.index(group[0][0]))
    for (what, one, other), names in by_kind:
        yield Difference(what, one, other, tuple(folded_names(names)))

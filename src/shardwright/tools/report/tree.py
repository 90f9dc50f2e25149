"""The model as a tree of modules, repeated blocks once, with how each operator is split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.core.cost.memory import binary
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.reasons import choice_lines, origin
from shardwright.core.plan.repeated_rows import Fold, fold_rows, module_words
from shardwright.core.plan.rows import OperatorRow, seconds_text, shape_text, shapes_text
from shardwright.tools.report.page import Branch, Operator, OperatorTensor
from shardwright.tools.report.picture import Picture, picture

DEEPEST = 24
"""Levels of modules in modules; deeper ones stand at the last."""


def page_tree(plan: PlanData) -> tuple[tuple[Branch | Operator, ...], tuple[Picture, ...]]:
    """The modules of a plan, and the pictures of the layouts in it."""
    pictures: dict[TensorLayout, int] = {}
    root = _Module("", "")
    for fold in fold_rows(plan.operators):
        *modules, name = module_words(fold.row.name, DEEPEST)
        at = root
        for word in modules:
            at = at.module(word)
        at.children.append(_operator(plan, fold, name, pictures))
    return tuple(map(_branch, root.children)), tuple(map(picture, pictures))


@dataclass
class _Module:
    """A module while its children are collected."""

    name: str
    path: str
    children: list[_Module | Operator] = field(default_factory=list)
    modules: dict[str, _Module] = field(default_factory=dict)

    def module(self, name: str) -> _Module:
        if name not in self.modules:
            self.modules[name] = _Module(name, f"{self.path}.{name}".lstrip("."))
            self.children.append(self.modules[name])
        return self.modules[name]


def _branch(node: _Module | Operator) -> Branch | Operator:
    if isinstance(node, Operator):
        return node
    children = tuple(map(_branch, node.children))
    if len(children) == 1 and isinstance(only := children[0], Branch):
        return Branch(**{**vars(only), "name": f"{node.name}.{only.name}"})
    sent, seconds = sum(child.bytes for child in children), sum(child.seconds for child in children)
    axes: set[int] = set()
    for child in children:
        axes |= (
            set(child.axes) if isinstance(child, Branch) else {a for _, c in child.cuts for a in c}
        )
    return Branch(
        name=node.name,
        path=node.path,
        children=children,
        axes=tuple(sorted(axes)),
        count=sum(child.count for child in children),
        bytes=sent,
        bytes_text=binary(sent) if sent else "",
        seconds=seconds,
        seconds_text=seconds_text(seconds) if seconds else "",
    )


def _operator(plan: PlanData, fold: Fold, name: str, pictures: dict[TensorLayout, int]) -> Operator:
    row, number = fold.row, fold.count
    why, reason = origin(plan, fold.members[0])
    return Operator(
        name=name,
        path=row.name,
        operator=row.operator,
        count=number,
        shapes=shapes_text(row),
        cuts=tuple((f, tuple(map(plan.mesh.axis, axes))) for f, axes in row.cuts.items()),
        bytes=number * row.bytes,
        bytes_text=binary(number * row.bytes) if row.bytes else "",
        seconds=number * row.seconds,
        seconds_text=seconds_text(number * row.seconds) if row.seconds else "",
        why=why,
        reason=reason,
        facts=tuple(_facts(plan, fold, reason)),
        inputs=tuple(_inputs(plan, row, pictures)),
        outputs=tuple(
            _tensor(f"output {index}" if index else "output", "", shape, layout, pictures)
            for index, (shape, layout) in enumerate(
                zip(row.outputs, row.output_layouts, strict=True)
            )
        ),
        redistributions=tuple(_redistributions(row)),
    )


def _facts(plan: PlanData, fold: Fold, reason: str) -> Iterable[tuple[str, str]]:
    row = fold.row
    yield "why", reason
    yield from choice_lines(plan, fold.members[0])
    if row.rule is not None:
        yield "rule", row.rule
    if fold.count > 1:
        yield "repeated", f"{fold.count} times; what follows is of one"
    if plan.pipeline.stages > 1:
        yield "stages", fold.stages
    if fold.recomputed:
        yield "backward pass", fold.recomputed
    if row.source:
        yield "source", row.source


def _inputs(
    plan: PlanData, row: OperatorRow, pictures: dict[TensorLayout, int]
) -> Iterable[OperatorTensor]:
    for (name, shape, kind), layout in zip(row.inputs, row.input_layouts, strict=True):
        stored = ""
        if kind == "parameter" and plan.storage.get(name, layout.axes) != layout.axes:
            stored = TensorLayout(plan.mesh, plan.storage[name]).placement
        yield _tensor(name, kind, shape, layout, pictures, stored)


def _tensor(
    name: str,
    kind: str,
    shape: tuple[int, ...],
    layout: TensorLayout,
    pictures: dict[TensorLayout, int],
    stored: str = "",
) -> OperatorTensor:
    return OperatorTensor(
        name,
        kind,
        shape_text(shape),
        shape_text(layout.shard_shape(shape)),
        layout.placement,
        pictures.setdefault(layout, len(pictures)),
        stored,
    )


def _redistributions(row: OperatorRow) -> Iterable[tuple[str, str, str]]:
    for each in row.redistributions:
        shared = "; the rest is shared with an earlier operator" if each.shared else ""
        sizes = f"{binary(each.forward_bytes)} forward, {binary(each.backward_bytes)} backward"
        yield each.value or "inside", ", then ".join(each.steps), f"{sizes}{shared}"

"""Tree of a model's modules and sharded operators; repeated blocks appear once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwright.core.cost.memory import bytes_text
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.reasons import choice_lines, cut_origin
from shardwright.core.plan.repeated_rows import Fold, fold_rows, split_module_path
from shardwright.core.plan.rows import OperatorRow, shape_text, shapes_text
from shardwright.tools.report.page import Branch, Operator, OperatorTensor
from shardwright.tools.report.picture import Picture, picture

MAX_DEPTH = 24
"""Maximum nesting depth of modules; deeper modules are shown at this depth."""

_OperatorInModules = tuple[list[str], Operator]
"""An operator, with the names of its enclosing modules from the outermost to the innermost."""


def page_tree(plan: PlanData) -> tuple[tuple[Branch | Operator, ...], tuple[Picture, ...]]:
    """Return the top-level modules and operators of a plan, and pictures of all its layouts."""
    # From a layout to the index of its picture: insertion order is the order of `Page.pictures`.
    pictures: dict[TensorLayout, int] = {}
    operators_in_modules: list[_OperatorInModules] = []
    for folded_ops in fold_rows(plan.operators):
        *modules, name = split_module_path(folded_ops.row.name, MAX_DEPTH)
        operators_in_modules.append(
            (modules, _make_page_operator(plan, folded_ops, name, pictures))
        )
    return tuple(_iterate_module_children(operators_in_modules)), tuple(map(picture, pictures))


def _iterate_module_children(
    operators_in_modules: list[_OperatorInModules], path: str = ""
) -> Iterator[Branch | Operator]:
    """Yield the children of the module at `path`, in the order of the model.

    A module whose only child is a module is merged with that child.
    """
    groups: dict[str | int, list[_OperatorInModules]] = {}
    for modules, operator in operators_in_modules:
        # An operator is a group of its own, under a number; modules have names.
        group = groups.setdefault(modules[0] if modules else id(operator), [])
        group.append((modules[1:], operator))
    for name, members in groups.items():
        if isinstance(name, int):
            yield members[0][1]
            continue
        child_path = f"{path}.{name}".lstrip(".")
        # A module's group has at least one operator, so the module has a child.
        first, *others = _iterate_module_children(members, child_path)
        if isinstance(first, Branch) and not others:
            yield replace(first, name=f"{name}.{first.name}")
        else:
            yield Branch(name, child_path, (first, *others))


def _make_page_operator(
    plan: PlanData, folded_ops: Fold, name: str, pictures: dict[TensorLayout, int]
) -> Operator:
    row, count = folded_ops.row, folded_ops.count
    # Folded operators are equal, so the reason of the first one holds for all.
    why, reason = cut_origin(plan, folded_ops.members[0])
    return Operator(
        name=name,
        path=row.name,
        operator=row.operator,
        count=count,
        shapes=shapes_text(row),
        # The page colors axes by their index in the mesh.
        cuts=tuple((factor, tuple(map(plan.mesh.axis, axes))) for factor, axes in row.cuts.items()),
        bytes=count * row.bytes,
        seconds=count * row.seconds,
        why=why,
        reason=reason,
        facts=tuple(_iterate_operator_properties(plan, folded_ops, reason)),
        inputs=tuple(_iterate_input_tensors(plan, row, pictures)),
        outputs=tuple(
            _make_operator_tensor(
                f"output {index}" if index else "output", "", shape, layout, pictures
            )
            for index, (shape, layout) in enumerate(
                zip(row.outputs, row.output_layouts, strict=True)
            )
        ),
        redistributions=tuple(_iterate_redistribution_rows(row)),
    )


def _iterate_operator_properties(
    plan: PlanData, folded_ops: Fold, reason: str
) -> Iterable[tuple[str, str]]:
    row = folded_ops.row
    yield "why", reason
    yield from choice_lines(plan, folded_ops.members[0])
    if row.rule is not None:
        yield "rule", row.rule
    if folded_ops.count > 1:
        yield "repeated", f"{folded_ops.count} times; the figures below are of one"
    if plan.pipeline.stages > 1:
        yield "stages", folded_ops.stages
    if folded_ops.recomputed:
        yield "backward pass", folded_ops.recomputed
    if row.source:
        yield "source", row.source


def _iterate_input_tensors(
    plan: PlanData, row: OperatorRow, pictures: dict[TensorLayout, int]
) -> Iterable[OperatorTensor]:
    for (name, shape, tensor_origin), layout in zip(row.inputs, row.input_layouts, strict=True):
        stored = ""
        # A parameter without an entry is stored as it is used.
        if tensor_origin == "parameter" and plan.storage.get(name, layout.axes) != layout.axes:
            stored = TensorLayout(plan.mesh, plan.storage[name]).placement
        yield _make_operator_tensor(name, tensor_origin, shape, layout, pictures, stored)


def _make_operator_tensor(
    name: str,
    origin: str,
    shape: tuple[int, ...],
    layout: TensorLayout,
    pictures: dict[TensorLayout, int],
    stored: str = "",
) -> OperatorTensor:
    return OperatorTensor(
        name,
        origin,
        shape_text(shape),
        shape_text(layout.shard_shape(shape)),
        layout.placement,
        pictures.setdefault(layout, len(pictures)),
        stored,
    )


def _iterate_redistribution_rows(row: OperatorRow) -> Iterable[tuple[str, str, str]]:
    for each in row.redistributions:
        # Consumers of one value share steps, which count for the first of them.
        shared = "; the rest is shared with an earlier operator" if each.shared else ""
        sizes = (
            f"{bytes_text(each.forward_bytes)} forward, {bytes_text(each.backward_bytes)} backward"
        )
        yield each.value or "inside", each.steps_text, f"{sizes}{shared}"

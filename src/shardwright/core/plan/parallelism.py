"""How an operator is split, in the words of the field: `row-parallel over tp, FSDP over fsdp`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow

REPLICATED, NO_RULE = "replicated", "no rule: replicated"

SHARDED_STORAGE = {"level1": "ZeRO-1", "level2": "ZeRO-2", "level3": "FSDP"}
"""What data parallel is called whose parameters are stored in shards, by the level of sharding."""

WORDS = {
    "batch": "data-parallel",
    "position": "sequence-parallel",
    "parameter": "tensor-parallel",
    "feature": "tensor-parallel",
    "expert": "expert-parallel",
}
AXIS_NAMES = {
    "dp": ("data parallel", "batch"),
    "fsdp": ("fully sharded data parallel", "batch"),
    "sp": ("sequence parallel", "position"),
    "ep": ("expert parallel", "expert"),
    "tp": ("tensor parallel", "parameter"),
}
"""What an axis of this name is for, and what it cuts in files that do not say it of each factor."""

LEVELS = {
    "level1": "gathered and reduced once a step",
    "level2": "with gradients reduced in each micro-batch",
    "level3": "gathered for each use",
}


def axis_purpose(plan: PlanData, axis: int) -> str:
    """What an axis of the device matrix is for."""
    if axis in plan.unused_axes:
        return "equal copies"
    return _of_name(plan.mesh.alias_names[axis])[0]


def _of_name(axis: str) -> tuple[str, str]:
    return AXIS_NAMES.get(axis.rstrip("0123456789"), ("mixed parallel", ""))


def sentence(plan: PlanData) -> str:
    """What was chosen, in words of the field."""
    pipeline, sizes = plan.pipeline, dict[str, int]()
    for axis, size in enumerate(plan.mesh.device_matrix):
        purpose = axis_purpose(plan, axis)
        sizes[purpose] = sizes.get(purpose, 1) * size
    words = [f"{word} {size}" for word, size in sizes.items()]
    if pipeline.stages > 1:
        words.insert(0, f"pipeline parallel {pipeline.stages} ({pipeline.schedule})")
    text = ", ".join(words) or "no parallelism"
    text = f"{text[0].upper()}{text[1:]}"
    if pipeline.micro_batches > 1:
        text += f", with {pipeline.micro_batches:,} micro-batches"
    if plan.sharding is not None:
        level = plan.sharding.level
        text += f"; parameters and optimizer state are stored in shards, {LEVELS[level]} ({level})"
    recomputed = sum(bool(row.segment) for row in plan.operators)
    if recomputed:
        text += f"; {recomputed:,} of {len(plan.operators):,} operators are recomputed"
    if plan.compute_dtype is not None:
        text += f"; computed in {plan.compute_dtype}"
    return text + "."


def parallelism(plan: PlanData, row: OperatorRow) -> tuple[str, ...]:
    """How `row` is split, one phrase for each factor that is cut, the batch last."""
    phrases = tuple(dict.fromkeys(_phrases(plan, row)))
    return (NO_RULE,) if row.rule is None else phrases or (REPLICATED,)


def _phrases(plan: PlanData, row: OperatorRow) -> Iterator[str]:
    summed = {axis for layout in row.output_layouts for axis in layout.partial}
    cuts = {factor: tuple(map(plan.mesh.axis, names)) for factor, names in row.cuts.items()}
    for factor, axes in sorted(cuts.items(), key=lambda cut: _meaning(row, *cut) == "batch"):
        over = f"over {'·'.join(row.cuts[factor])}"
        meaning = _meaning(row, factor, axes)
        weights = [each for each in _weights(row).values() if each.sharded.issuperset(axes)]
        if meaning == "batch" and not weights:
            yield f"{_data_parallel(plan, row, factor, axes)} {over}"
        elif weights and meaning != "expert" and any(len(each.axes) > 1 for each in weights):
            yield f"{'row-parallel' if summed.issuperset(axes) else 'column-parallel'} {over}"
        else:
            yield f"{WORDS.get(meaning, 'split')} {over}"


def _meaning(row: OperatorRow, factor: str, axes: Axes) -> str:
    return row.meanings.get(factor) or (_of_name(row.cuts[factor][0])[1] if axes else "")


def _weights(row: OperatorRow) -> dict[str, TensorLayout]:
    tensors = zip(row.inputs, row.input_layouts, strict=True)
    return {name: layout for (name, _, kind), layout in tensors if kind == "parameter"}


def _data_parallel(plan: PlanData, row: OperatorRow, factor: str, axes: Axes) -> str:
    """Data parallel, by where parameters are stored in shards: for the axes that the whole plan
    uses so their names say it, for others the parameters that `row` reads."""
    names = row.cuts[factor]
    if all(name.startswith(("dp", "fsdp")) for name in names):
        shards = {axis for axis, name in zip(axes, names, strict=True) if name.startswith("fsdp")}
    else:
        weights = _weights(row).items()
        stored = {a for name, _ in weights for dim in plan.storage.get(name, ()) for a in dim}
        shards = stored - {a for _, layout in weights for a in layout.sharded}
    if not shards.intersection(axes):
        return WORDS["batch"]
    level = "level3" if plan.sharding is None else plan.sharding.level
    return SHARDED_STORAGE[level] if level != "level3" or shards.issuperset(axes) else "HSDP"

"""Name the parallelism of plans and operators: `row-parallel over tp, FSDP over fsdp`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow

REPLICATED, NO_RULE = "replicated", "no rule: replicated"

DATA_PARALLELISM_OF_LEVEL = {"level1": "ZeRO-1", "level2": "ZeRO-2", "level3": "FSDP"}
"""Names of data parallelism with sharded parameters or optimizer state, by ZeRO level."""

PARALLELISM_OF_MEANING = {
    "batch": "data-parallel",
    "position": "sequence-parallel",
    "parameter": "tensor-parallel",
    "feature": "tensor-parallel",
    "expert": "expert-parallel",
}
"""Names of the parallelism that shards a factor, by the factor's meaning in `OperatorRow.meanings`.
"""

PARALLELISM_OF_AXIS_NAME = {
    "dp": ("data parallel", "batch"),
    "fsdp": ("fully sharded data parallel", "batch"),
    "sp": ("sequence parallel", "position"),
    "ep": ("expert parallel", "expert"),
    "tp": ("tensor parallel", "parameter"),
}
"""(Parallelism, meaning of the sharded factors) by name of the mesh axis.

The meaning is used for plan files of earlier releases, which lack `OperatorRow.meanings`.
"""

COMMUNICATION_OF_LEVEL = {
    "level1": "gathered and reduced once a step",
    "level2": "with gradients reduced in each micro-batch",
    "level3": "gathered for each use",
}
"""Descriptions of when parameters are all-gathered and gradients reduced, by ZeRO level."""


def axis_parallelism(plan: PlanData, axis: int) -> str:
    """Return the parallelism of a mesh axis, such as `tensor parallel`; `replicated` for an axis
    that shards no operator."""
    if axis in plan.unused_axes:
        return "replicated"
    return _look_up_axis_name(plan.mesh.alias_names[axis])[0]


def _look_up_axis_name(axis_name: str) -> tuple[str, str]:
    # Several axes of equal parallelism are numbered: dp0, dp1.
    return PARALLELISM_OF_AXIS_NAME.get(axis_name.rstrip("0123456789"), ("mixed parallel", ""))


def parallelism_sentence(plan: PlanData) -> str:
    """Describe a plan's parallelism, ZeRO level and recomputation in one sentence."""
    pipeline, sizes = plan.pipeline, dict[str, int]()
    for axis, size in enumerate(plan.mesh.device_matrix):
        parallelism = axis_parallelism(plan, axis)
        # Axes of equal parallelism, such as dp0 and dp1, are one degree in the sentence.
        sizes[parallelism] = sizes.get(parallelism, 1) * size
    words = [f"{parallelism} {size}" for parallelism, size in sizes.items()]
    if pipeline.stages > 1:
        words.insert(0, f"pipeline parallel {pipeline.stages} ({pipeline.schedule})")
    description = ", ".join(words) or "no parallelism"
    description = f"{description[0].upper()}{description[1:]}"
    if pipeline.micro_batches > 1:
        description += f", with {pipeline.micro_batches:,} micro-batches"
    if plan.sharding is not None:
        level = plan.sharding.level
        when = f"{COMMUNICATION_OF_LEVEL[level]} ({level})"
        description += f"; parameters and optimizer state are stored in shards, {when}"
    recomputed = sum(bool(row.segment) for row in plan.operators)
    if recomputed:
        description += f"; {recomputed:,} of {len(plan.operators):,} operators are recomputed"
    if plan.compute_dtype is not None:
        description += f"; computed in {plan.compute_dtype}"
    return description + "."


def parallelism_phrases(plan: PlanData, row: OperatorRow) -> tuple[str, ...]:
    """Return the parallelism of an operator: one phrase per sharded factor, such as `row-parallel
    over tp`, with data parallelism last."""
    phrases = tuple(dict.fromkeys(_describe_operator_parallelism(plan, row)))
    # An operator without a rule is replicated, too, but for another reason, which users can change.
    return (NO_RULE,) if row.rule is None else phrases or (REPLICATED,)


def _describe_operator_parallelism(plan: PlanData, row: OperatorRow) -> Iterator[str]:
    # As in Megatron: an operator whose weight is sharded along the summed dimension produces
    # partial sums and is row-parallel; otherwise it is column-parallel.
    partial_axes = {axis for layout in row.output_layouts for axis in layout.partial}
    cuts = {factor: tuple(map(plan.mesh.axis, names)) for factor, names in row.cuts.items()}
    # False sorts before True, so that data parallelism comes last.
    for factor, axes in sorted(
        cuts.items(), key=lambda cut: _find_factor_meaning(row, *cut) == "batch"
    ):
        over = f"over {'·'.join(row.cuts[factor])}"
        meaning = _find_factor_meaning(row, factor, axes)
        # Parameters that the axes of the factor shard.
        weights = [
            layout
            for layout in _find_parameter_layouts(row).values()
            if layout.sharded.issuperset(axes)
        ]
        if meaning == "batch" and not weights:
            yield f"{_describe_data_parallelism(plan, row, factor, axes)} {over}"
        # Row and column are sides of a matrix: a sharded bias or norm alone has neither.
        elif weights and meaning != "expert" and any(len(layout.axes) > 1 for layout in weights):
            yield f"{'row-parallel' if partial_axes.issuperset(axes) else 'column-parallel'} {over}"
        else:
            yield f"{PARALLELISM_OF_MEANING.get(meaning, 'split')} {over}"


def _find_factor_meaning(row: OperatorRow, factor: str, axes: Axes) -> str:
    """Return the meaning of a sharded factor, such as `batch`; empty if unknown.

    In plan files without meanings, it follows from the name of the first mesh axis that shards the
    factor.
    """
    return row.meanings.get(factor) or (_look_up_axis_name(row.cuts[factor][0])[1] if axes else "")


def _find_parameter_layouts(row: OperatorRow) -> dict[str, TensorLayout]:
    """Return the layouts in which an operator reads its parameters, by parameter name."""
    tensors = zip(row.inputs, row.input_layouts, strict=True)
    return {name: layout for (name, _, origin), layout in tensors if origin == "parameter"}


def _describe_data_parallelism(plan: PlanData, row: OperatorRow, factor: str, axes: Axes) -> str:
    """Return the data parallelism of a factor: `data-parallel` if all parameters are replicated
    over `axes`, else FSDP, HSDP or ZeRO.

    Axes named `dp` replicate parameters, and axes named `fsdp` shard them. For axes with other
    names, the storage layouts of the parameters of `row` decide.

    Args:
        plan: the plan.
        row: the operator.
        factor: the sharded factor of the batch.
        axes: the mesh axes that shard `factor`.
    """
    names = row.cuts[factor]
    # `dp` and `fsdp` say whether parameters are sharded over the axis, for all operators.
    if all(name.startswith(("dp", "fsdp")) for name in names):
        shards = {axis for axis, name in zip(axes, names, strict=True) if name.startswith("fsdp")}
    else:
        weights = _find_parameter_layouts(row).items()
        stored = {a for name, _ in weights for dim in plan.storage.get(name, ()) for a in dim}
        # Axes that shard a parameter where it is read too are tensor parallel, not ZeRO.
        shards = stored - {a for _, layout in weights for a in layout.sharded}
    if not shards.intersection(axes):
        return PARALLELISM_OF_MEANING["batch"]
    # Parameters that are stored in shards without a ZeRO level are gathered for each use, as in
    # FSDP.
    level = "level3" if plan.sharding is None else plan.sharding.level
    return (
        # HSDP: parameters are sharded over some axes of the batch and replicated over the others.
        DATA_PARALLELISM_OF_LEVEL[level] if level != "level3" or shards.issuperset(axes) else "HSDP"
    )

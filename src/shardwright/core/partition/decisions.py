"""The decisions of a plan: cuts, storage and recomputation.

The search makes these decisions; cost and lowering read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import MappingProxyType

from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts
from shardwright.errors import StrategyError

CutAxes = tuple[Axes, ...]
"""Mesh axes that shard each dimension of a tensor."""

Storage = Mapping[str, CutAxes]
"""Storage layout of each parameter, by name."""

Outputs = Mapping[str, tuple[CutAxes | None, ...]]
"""Pinned layouts of the outputs of operators, by operator name; None for outputs that are not
pinned."""

NO_OUTPUTS: Outputs = MappingProxyType({})
"""Pinned layouts of a plan that pins no outputs."""

BUCKET_BYTES = 25 * 2**20
"""Default bucket size in bytes, as in DistributedDataParallel."""

ZERO_LEVELS = ("level1", "level2", "level3")
"""Values of `OptimizerParallel.level`: ZeRO-1, ZeRO-2, ZeRO-3."""


@dataclass(frozen=True)
class OptimizerParallel:
    """Sharded storage of parameters and optimizer state over their replicas (ZeRO, HSDP).

    Args:
        level: `level1` gathers parameters once per step, accumulates unsharded gradients over the
            micro-batches and reduces them once (ZeRO-1); `level2` reduces the gradients of each
            micro-batch as soon as they are complete (ZeRO-2); `level3` also frees gathered
            parameters after use and gathers them again in the backward pass (ZeRO-3, FSDP). With
            one micro-batch, `level1` and `level2` are the same.
        shard_size: number of devices over which a parameter is sharded; -1 for all devices that
            replicate the parameter.
        threshold: minimum size of a parameter to be sharded, in KiB of its stored dtype.

    Raises:
        StrategyError: if a value is invalid.
    """

    level: str = "level1"
    shard_size: int = -1
    # The default of MindSpore's `parallel_optimizer_threshold`.
    threshold: int = 64

    def __post_init__(self) -> None:
        if self.level not in ZERO_LEVELS:
            raise StrategyError(
                f"OptimizerParallel: level {self.level!r} is unknown\n"
                f"use one of {', '.join(ZERO_LEVELS)}"
            )
        # `True` is an int in Python, and would be a size of 1.
        is_int = isinstance(self.shard_size, int) and not isinstance(self.shard_size, bool)
        if not is_int or (self.shard_size < 1 and self.shard_size != -1):
            raise StrategyError(
                f"OptimizerParallel: shard_size {self.shard_size!r} must be a whole number of at"
                " least 1, or -1\nuse the number of devices over which to shard a parameter, or -1"
                " for all that replicate it"
            )
        is_int = isinstance(self.threshold, int) and not isinstance(self.threshold, bool)
        if not is_int or self.threshold < 0:
            raise StrategyError(
                f"OptimizerParallel: threshold {self.threshold!r} must be a whole number of KiB, at"
                " least 0\nuse 0 to shard parameters of any size"
            )


@dataclass(frozen=True)
class Recompute:
    """Recomputation of an operator in the backward pass (activation checkpointing).

    Args:
        segment: name of the segment; consecutive operators of one segment are recomputed together.
        communication: whether redistributions inside the segment are repeated too; if not, their
            results are saved.
    """

    segment: str
    communication: bool = True


@dataclass(frozen=True)
class Decisions:
    """All decisions for the program of a model, or of a chunk of a model.

    Args:
        cuts: mesh axes that shard each factor of each sharded operator, by operator name.
        storage: storage layout of each parameter, by name.
        outputs: pinned layouts of operator outputs, by operator name.
        arrivals: layouts of inputs that are not replicated, by input name.
        departures: layouts in which the program sends values to a later chunk, by value name.
        local_outputs: layouts of model outputs that each rank returns only for its local batch, by
            value name.
        sharding: ZeRO / HSDP configuration; None to store parameters as operators use them.
        bucket_bytes: maximum bytes of gathered parameters in a bucket.
        recompute: recomputation of each recomputed operator, by operator name.
    """

    cuts: Mapping[str, Cuts]
    storage: Storage
    outputs: Outputs = field(default_factory=dict)
    arrivals: Mapping[str, CutAxes] = field(default_factory=dict)
    departures: Mapping[str, CutAxes] = field(default_factory=dict)
    local_outputs: Mapping[str, CutAxes] = field(default_factory=dict)
    sharding: OptimizerParallel | None = None
    bucket_bytes: int = BUCKET_BYTES
    recompute: Mapping[str, Recompute] = field(default_factory=dict)


def adapt_decisions(decisions: Decisions, graph: Graph, mesh: DeviceMatrix) -> Decisions:
    """Return `decisions` adapted to `graph`, a capture of the same model in another mode or with
    other input shapes.

    Cuts are reduced to axes by which the sizes in `graph` are divisible.
    """
    # Storage stays, as parameters have the same shapes in every capture.
    return replace(
        decisions,
        cuts=_reduce_cuts_to_divisible_axes(decisions.cuts, graph, mesh),
        outputs=_keep_divisible_output_layouts(decisions.outputs, graph, mesh),
    )


def _reduce_cuts_to_divisible_axes(
    cuts: Mapping[str, Cuts], graph: Graph, mesh: DeviceMatrix
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the cuts of the operators in `graph`, each reduced to its leading axes that divide the
    sizes of its factor."""
    result = {}
    for op in graph.ops:
        rule = rule_of(op)
        if rule is not None and op.name in cuts:
            divisible_cuts = {
                factor: _leading_axes_dividing_size(mesh, axes, rule.capacity[factor])
                for factor, axes in cuts[op.name].items()
                if factor in rule.factors
            }
            # Each factor is divisible, but a dimension that two factors cut may not be.
            indivisible = rule.indivisible_factor(mesh, divisible_cuts)
            result[op.name] = {f: axes for f, axes in divisible_cuts.items() if f != indivisible}
    return result


def _keep_divisible_output_layouts(outputs: Outputs, graph: Graph, mesh: DeviceMatrix) -> Outputs:
    """Return the pinned output layouts of the operators in `graph`; None for an output with sizes
    that are not divisible."""
    return {
        op.name: tuple(
            axes if axes is not None and _axes_divide_shape(mesh, axes, value.shape) else None
            for axes, value in zip(outputs[op.name], op.outputs, strict=False)
        )
        for op in graph.ops
        if op.name in outputs
    }


def _leading_axes_dividing_size(
    mesh: DeviceMatrix, axes: tuple[int, ...], capacity: int
) -> tuple[int, ...]:
    # Only leading axes, which are the most significant: new shards are unions of planned shards.
    lengths = range(1, len(axes) + 1)
    divisible = list(takewhile(lambda n: capacity % mesh.size(axes[:n]) == 0, lengths))
    return axes[: divisible[-1]] if divisible else ()


def _axes_divide_shape(
    mesh: DeviceMatrix, axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> bool:
    # A count of 0 marks a tensor with another number of dimensions.
    counts = TensorLayout(mesh, axes).shard_counts if len(axes) == len(shape) else (0,)
    return all(count and size % count == 0 for size, count in zip(shape, counts, strict=False))

"""Decisions of a plan: cuts, storage, recomputation. Made by search, read by cost and lowering."""

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
"""Pinned layouts of operator outputs, by operator name; None for an output that is not pinned."""

NO_OUTPUTS: Outputs = MappingProxyType({})

BUCKET_BYTES = 25 * 2**20
"""Default bucket size, the same as that of DistributedDataParallel."""

LEVELS = ("level1", "level2", "level3")


@dataclass(frozen=True)
class OptimizerParallel:
    """Sharded storage of parameters and optimizer state over their replicas (ZeRO, HSDP).

    Args:
        level: `level1` gathers parameters once per step, accumulates unsharded gradients over the
            micro-batches and reduces them once (ZeRO-1); `level2` reduces the gradients of each
            micro-batch as soon as they are complete (ZeRO-2); `level3` also frees gathered
            parameters after use and gathers them again in the backward pass (ZeRO-3, FSDP). With
            one micro-batch, `level1` and `level2` are the same.
        shard_size: number of devices over which a parameter is sharded; -1 for all its replicas.
        threshold: parameters of less than this many KiB, as stored, are not sharded.

    Raises:
        StrategyError: if a value is invalid.
    """

    level: str = "level1"
    shard_size: int = -1
    threshold: int = 64

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise StrategyError(
                f"OptimizerParallel: level {self.level!r} is unknown\nvalid are {', '.join(LEVELS)}"
            )
        is_int = isinstance(self.shard_size, int) and not isinstance(self.shard_size, bool)
        if not is_int or (self.shard_size < 1 and self.shard_size != -1):
            raise StrategyError(
                f"OptimizerParallel: shard_size {self.shard_size!r} must be a whole number of at"
                " least 1, or -1 for all replicas of a parameter"
            )
        is_int = isinstance(self.threshold, int) and not isinstance(self.threshold, bool)
        if not is_int or self.threshold < 0:
            raise StrategyError(
                f"OptimizerParallel: threshold {self.threshold!r} must be a whole number of KB, at"
                " least 0"
            )


@dataclass(frozen=True)
class Recompute:
    """Recomputation of an operator in the backward pass (activation checkpointing).

    Args:
        segment: consecutive operators of the same segment are recomputed together.
        communication: whether redistributions inside are repeated too; else their results are
            saved.
    """

    segment: str
    communication: bool = True


@dataclass(frozen=True)
class Decisions:
    """All decisions for one program, of a model or of a chunk of it.

    Args:
        cuts: factors of each sharded operator, with the axes that cut them.
        storage: storage layout of each parameter.
        outputs: pinned layouts of operator outputs.
        arrivals: layouts of inputs that are not replicated, by name.
        departures: layouts in which the program returns values, by name; see `communication` for
            the default.
        sharding: ZeRO / HSDP configuration; None stores parameters as they are used.
        bucket_bytes: size up to which collectives of parameters are bucketed.
        recompute: operators to recompute in the backward pass.
    """

    cuts: Mapping[str, Cuts]
    storage: Storage
    outputs: Outputs = field(default_factory=dict)
    arrivals: Mapping[str, CutAxes] = field(default_factory=dict)
    departures: Mapping[str, CutAxes] = field(default_factory=dict)
    sharding: OptimizerParallel | None = None
    bucket_bytes: int = BUCKET_BYTES
    recompute: Mapping[str, Recompute] = field(default_factory=dict)


def adapt_decisions(decisions: Decisions, graph: Graph, mesh: DeviceMatrix) -> Decisions:
    """Adapt decisions to `graph`, a capture of the same model in another mode or with other input
    shapes. Cuts that no longer divide evenly are dropped."""
    return replace(
        decisions,
        cuts=_adapted_cuts(decisions.cuts, graph, mesh),
        outputs=_adapted_outputs(decisions.outputs, graph, mesh),
    )


def _adapted_cuts(
    cuts: Mapping[str, Cuts], graph: Graph, mesh: DeviceMatrix
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Cuts of the operators that `graph` has: of each factor, the leading axes that divide it."""
    result = {}
    for op in graph.ops:
        rule = rule_of(op)
        if rule is not None and op.name in cuts:
            dividing = {
                factor: _dividing_axes(mesh, axes, rule.capacity[factor])
                for factor, axes in cuts[op.name].items()
                if factor in rule.factors
            }
            # Joined factors divide a dimension together: each may divide it while both do not.
            indivisible = rule.indivisible_factor(mesh, dividing)
            result[op.name] = {f: axes for f, axes in dividing.items() if f != indivisible}
    return result


def _adapted_outputs(outputs: Outputs, graph: Graph, mesh: DeviceMatrix) -> Outputs:
    """Pinned output layouts of the operators that `graph` has, where they still divide evenly."""
    return {
        op.name: tuple(
            axes if axes is not None and _divides(mesh, axes, value.shape) else None
            for axes, value in zip(outputs[op.name], op.outputs, strict=False)
        )
        for op in graph.ops
        if op.name in outputs
    }


def _dividing_axes(mesh: DeviceMatrix, axes: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    # Leading axes only, the most significant ones: then new shards are unions of planned ones.
    lengths = range(1, len(axes) + 1)
    dividing_lengths = list(takewhile(lambda n: capacity % mesh.size(axes[:n]) == 0, lengths))
    return axes[: dividing_lengths[-1]] if dividing_lengths else ()


def _divides(mesh: DeviceMatrix, axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> bool:
    counts = TensorLayout(mesh, axes).shard_counts if len(axes) == len(shape) else (0,)
    return all(parts and size % parts == 0 for size, parts in zip(shape, counts, strict=False))

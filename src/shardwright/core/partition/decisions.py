"""What was decided of a program, bundled: search writes it, cost and lowering read it."""

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
"""For each dimension of a tensor the axes that cut it."""

Storage = Mapping[str, CutAxes]
"""For each parameter the axes that cut each of its dimensions as it is stored."""

Outputs = Mapping[str, tuple[CutAxes | None, ...]]
"""For operators that are told how to leave their outputs: the axes that cut each dimension of each
output, or None where the operator is free."""

NO_OUTPUTS: Outputs = MappingProxyType({})

BUCKET_BYTES = 25 * 2**20
"""The size of buckets that PyTorch's own DistributedDataParallel uses."""

LEVELS = ("level1", "level2", "level3")


@dataclass(frozen=True)
class OptimizerParallel:
    """Parameters stored sharded over axes on which they are used whole (HSDP, ZeRO).

    Args:
        level: `level1` gathers parameters once a step, adds up whole gradients over the
            micro-batches and reduces them once; `level2` reduces the gradients of each micro-batch
            as soon as they are complete; `level3` also frees gathered parameters after their use
            and gathers them again in the backward pass. With one micro-batch the first two are one.
        shard_size: over how many devices a parameter is sharded; -1 for all that hold it whole.
        threshold: parameters of fewer KB (1024 bytes, as stored) stay as they are used.

    Raises:
        StrategyError: if a value is not valid.
    """

    level: str = "level1"
    shard_size: int = -1
    threshold: int = 64

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise StrategyError(
                f"optimizer parallel: level {self.level!r}; valid are {', '.join(LEVELS)}"
            )
        whole = isinstance(self.shard_size, int) and not isinstance(self.shard_size, bool)
        if not whole or (self.shard_size < 1 and self.shard_size != -1):
            raise StrategyError(
                f"optimizer parallel: shard_size {self.shard_size!r} must be a whole number of at"
                " least 1, or -1 for all devices that hold a parameter whole"
            )
        whole = isinstance(self.threshold, int) and not isinstance(self.threshold, bool)
        if not whole or self.threshold < 0:
            raise StrategyError(
                f"optimizer parallel: threshold {self.threshold!r} must be a whole number of KB, at"
                " least 0"
            )


@dataclass(frozen=True)
class Recompute:
    """That an operator's results are computed again in the backward pass instead of kept.

    Args:
        segment: operators that follow each other with equal segments are computed again together.
        communication: whether redistributions inside are made again too, or their results kept.
    """

    segment: str
    communication: bool = True


@dataclass(frozen=True)
class Decisions:
    """Everything that was decided of one program: a model, or what one pipeline stage runs of it.

    Args:
        cuts: for each cut operator its factors with the axes that cut them.
        storage: how parameters are stored.
        outputs: how operators are told to leave their outputs.
        arrivals: by name, how inputs arrive that are not whole on every device.
        departures: by name, how values are left that the program returns; by default as `outputs`
            of a model are.
        sharding: of parameters and optimizer state; None leaves parameters stored as used.
        bucket_bytes: parameters' collectives are joined up to this size.
        recompute: the operators that are computed again in the backward pass.
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
    """The decisions for `graph`, the same model in another mode or for inputs of other shapes, as
    far as they still divide it."""
    return replace(
        decisions,
        cuts=_adapted_cuts(decisions.cuts, graph, mesh),
        outputs=_adapted_outputs(decisions.outputs, graph, mesh),
    )


def _adapted_cuts(
    cuts: Mapping[str, Cuts], graph: Graph, mesh: DeviceMatrix
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The cuts of the operators that `graph` has, by name; of each factor the most significant axes
    for which it still divides."""
    result = {}
    for op in graph.ops:
        rule = rule_of(op)
        if rule is not None and op.name in cuts:
            kept = {
                factor: _dividing(mesh, axes, rule.capacity[factor])
                for factor, axes in cuts[op.name].items()
                if factor in rule.factors
            }
            further = rule.indivisible_factor(mesh, kept)
            result[op.name] = {f: axes for f, axes in kept.items() if f != further}
    return result


def _adapted_outputs(outputs: Outputs, graph: Graph, mesh: DeviceMatrix) -> Outputs:
    """Likewise for the layouts in which operators are told to leave their outputs."""
    return {
        op.name: tuple(
            axes if axes is not None and _divides(mesh, axes, value.shape) else None
            for axes, value in zip(outputs[op.name], op.outputs, strict=False)
        )
        for op in graph.ops
        if op.name in outputs
    }


def _dividing(mesh: DeviceMatrix, axes: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    lengths = range(1, len(axes) + 1)
    fitting = list(takewhile(lambda n: capacity % mesh.size(axes[:n]) == 0, lengths))
    return axes[: fitting[-1]] if fitting else ()


def _divides(mesh: DeviceMatrix, axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> bool:
    counts = TensorLayout(mesh, axes).shard_counts if len(axes) == len(shape) else (0,)
    return all(parts and size % parts == 0 for size, parts in zip(shape, counts, strict=False))

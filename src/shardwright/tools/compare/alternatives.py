"""Alternatives of dividing one model over the same devices, and how they compare."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import prod

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.collectives import Links
from shardwright.core.cost.flops import work_of
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import axis_names, prime_factors
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.models.expert_sharding import ROW

GridPoint = tuple[int, int, int]
"""Data, model and pipeline parallel."""

AUTO, EXPERT, DATA_PARALLEL, TENSOR_PARALLEL, GRID, OF_GRID = (
    "auto",
    "expert",
    "data parallel",
    "tensor parallel",
    "best of grid",
    "of grid",
)
"""Kinds of alternatives. `of grid`: faster than the best of the grid, but too large."""

NEAR = 1e-3
"""Times that differ by less, relatively, count as equal."""


def alternative_name(kind: str, parts: GridPoint | None) -> str:
    """An alternative in words: `expert 2·4·1`."""
    return kind if parts is None else f"{kind} {'·'.join(map(str, parts))}"


@dataclass(frozen=True)
class Alternative:
    """One way of dividing a model, priced.

    Args:
        kind: `auto`, `expert`, `data parallel`, `tensor parallel`, `best of grid` or `of grid`.
        parts: None where each operator has its own.
        seconds: predicted, of a step.
        tokens_per_second: predicted, of all devices together.
        memory: bytes that a device needs at most.
        bytes: that a device sends in a step.
        fits: whether that is within the memory limit.
        gap: of `auto`, by what share it costs more at most than the best with as many stages.
    """

    kind: str
    parts: GridPoint | None
    seconds: float
    tokens_per_second: float
    memory: int
    bytes: int
    fits: bool
    gap: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The alternatives of one model on the same devices, with the same batch.

    Args:
        limit: bytes of a device; None: any number.
        alternatives: those that could be planned; `auto` and `expert` among them.
    """

    model: str
    devices: int
    cluster: str
    global_batch: int
    limit: int | None
    alternatives: tuple[Alternative, ...]

    def of_kind(self, kind: str) -> Alternative | None:
        """Returns the alternative of `kind`, or None if it could not be planned."""
        return next((each for each in self.alternatives if each.kind == kind), None)

    @property
    def speed_up(self) -> float:
        """Tokens per second of `auto` over those of `expert`."""
        auto, expert = self.of_kind(AUTO), self.of_kind(EXPERT)
        assert auto is not None and expert is not None
        return auto.tokens_per_second / expert.tokens_per_second

    @property
    def too_large(self) -> tuple[Alternative, ...]:
        """The alternatives that need more than the limit, each once, the fastest first. `holds`
        does not count them."""
        excluded = [each for each in reversed(self.alternatives) if not each.fits]
        distinct = {(each.parts, each.memory): each for each in excluded}
        return tuple(sorted(distinct.values(), key=lambda each: each.seconds))

    @property
    def holds(self) -> bool:
        """Whether `auto` fits, and is as fast as every alternative that fits; to a thousandth."""
        auto = self.of_kind(AUTO)
        assert auto is not None
        others = [each.tokens_per_second for each in self.alternatives if each.fits]
        return auto.fits and auto.tokens_per_second >= (1 - NEAR) * max(others, default=0.0)


def least_seconds(graph: Graph, cluster: Cluster, parts: GridPoint, micro_batches: int) -> float:
    """Seconds that a step takes at least: matrix products that all devices share equally, and the
    all-reduce behind each linear layer that `models.expert` cuts along its inputs, forward and
    backward. An average stage computes all micro-batches, and waits while the others compute one of
    them besides, unless devices share a processor.

    Args:
        graph: captured with one micro-batch.
    """
    data, model, stages = parts
    device = cluster.device.among(prod(parts))
    outer, inner = prime_factors(data), prime_factors(model)
    mesh = DeviceMatrix((*outer, *inner), tuple(islice(axis_names(), len(outer) + len(inner))))
    links, axes = Links(cluster, mesh, stages), range(len(outer), len(outer) + len(inner))
    seconds = 0.0
    for op in graph.ops:
        work = work_of(op)
        flops = work.forward_flops + work.backward_flops
        if flops:
            seconds += (
                flops / data / model / device.rate(work.dtype, attention=work.kind == "attention")
            )
        if flops and op.module.rpartition(".")[2] in ROW:
            sent = op.output.numel * op.output.itemsize / data
            passes = 2 if op.inputs[0].requires_grad else 1
            seconds += passes * links.seconds("all_reduce", axes, sent)
    waiting = 0 if cluster.device.shared(prod(parts)) else stages - 1
    return (micro_batches + waiting) * seconds / stages

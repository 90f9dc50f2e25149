"""Alternative shardings of one model over the same devices, and their comparison."""

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
"""Degrees of data, tensor and pipeline parallelism."""

AUTO, EXPERT, DATA_PARALLEL, TENSOR_PARALLEL, GRID, OF_GRID = (
    "auto",
    "expert",
    "data parallel",
    "tensor parallel",
    "best of grid",
    "of grid",
)
"""Types of compared plans. The grid has all degrees of data, tensor and pipeline parallelism: `best
of grid` is its fastest plan within the memory limit, `of grid` a faster plan over the limit."""

TOLERANCE = 1e-3
"""Relative difference below which two step times count as equal."""


def alternative_name(name: str, degrees: GridPoint | None) -> str:
    """Format the name of an alternative, such as `expert 2·4·1`."""
    return name if degrees is None else f"{name} {'·'.join(map(str, degrees))}"


@dataclass(frozen=True)
class Alternative:
    """One sharding of a model with its predicted costs.

    Args:
        kind: type of alternative: `auto`, `expert`, `data parallel`, `tensor parallel`, `best of
            grid` or `of grid`.
        parts: degrees of data, tensor and pipeline parallelism; None if operators are sharded
            individually.
        seconds: predicted step time.
        tokens_per_second: predicted throughput of all devices together.
        memory: predicted peak memory per device, in bytes.
        bytes: communication volume per device and step, in bytes.
        fits: whether `memory` is within the memory limit of the comparison.
        gap: for `auto`, upper bound on (cost / optimal cost - 1) at equal numbers of stages; None
            for other alternatives.
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
        global_batch: samples per step.
        limit: memory limit in bytes per device; None without a limit.
        alternatives: all alternatives that could be planned; includes `auto` and `expert`.
    """

    model: str
    devices: int
    cluster: str
    global_batch: int
    limit: int | None
    alternatives: tuple[Alternative, ...]

    def of_kind(self, name: str) -> Alternative | None:
        """Return the first alternative of type `name`; None if no alternative of this type could be
        planned."""
        return next((each for each in self.alternatives if each.kind == name), None)

    @property
    def speed_up(self) -> float:
        """Predicted throughput of the automatic plan relative to the expert plan."""
        auto, expert = self.of_kind(AUTO), self.of_kind(EXPERT)
        assert auto is not None and expert is not None
        return auto.tokens_per_second / expert.tokens_per_second

    @property
    def too_large(self) -> tuple[Alternative, ...]:
        """Distinct alternatives over the memory limit, fastest first."""
        # Reversed, so that of equal alternatives the first one stays in the dictionary.
        excluded = [each for each in reversed(self.alternatives) if not each.fits]
        distinct = {(each.parts, each.memory): each for each in excluded}
        return tuple(sorted(distinct.values(), key=lambda each: each.seconds))

    @property
    def auto_is_fastest(self) -> bool:
        """Whether `auto` is, up to `TOLERANCE`, the fastest alternative within memory."""
        auto = self.of_kind(AUTO)
        assert auto is not None
        speeds = [each.tokens_per_second for each in self.alternatives if each.fits]
        # Up to the tolerance, because plans with equal shardings may have slightly different times.
        return auto.fits and auto.tokens_per_second >= (1 - TOLERANCE) * max(speeds, default=0.0)


def step_seconds_bound(
    graph: Graph, cluster: Cluster, degrees: GridPoint, micro_batches: int
) -> float:
    """Return a lower bound on the step time of a Megatron-style plan, in seconds.

    Counts the matrix products, divided evenly over all devices, and the all-reduces of the
    row-parallel linear layers, forward and backward. With p stages and m micro-batches, a 1F1B
    schedule takes (m + p - 1) / p times the sum over one micro-batch. On devices that share a
    processor it takes m / p times that sum, because waiting devices do not use the processor.

    Args:
        graph: the graph of one micro-batch.
        cluster: the cluster, with rates and links of its devices.
        degrees: degrees of parallelism.
        micro_batches: number of micro-batches per step.
    """
    data, model, stages = degrees
    device = cluster.device.with_active_devices(prod(degrees))
    # One axis for each prime factor, as in plans.
    data_axes, model_axes = prime_factors(data), prime_factors(model)
    num_axes = len(data_axes) + len(model_axes)
    mesh = DeviceMatrix((*data_axes, *model_axes), tuple(islice(axis_names(), num_axes)))
    # The innermost axes, which have the fastest links, are those of tensor parallelism.
    links, axes = Links(cluster, mesh, stages), range(len(data_axes), num_axes)
    seconds = 0.0
    for op in graph.ops:
        work = work_of(op)
        flops = work.forward_flops + work.backward_flops
        # Without sizes, `rate` is that of large products, which keeps the result a lower bound.
        if flops:
            seconds += (
                flops / data / model / device.rate(work.dtype, (), work.category == "attention")
            )
        if flops and op.module.rpartition(".")[2] in ROW:
            # Not divided by `model`: the output is a partial sum of full width.
            local_bytes = op.output.numel * op.output.itemsize / data
            # One all-reduce forward, and one backward unless the input needs no gradient.
            passes = 2 if op.inputs[0].requires_grad else 1
            seconds += passes * links.seconds("all_reduce", axes, local_bytes)
    bubbles = 0 if cluster.device.is_oversubscribed(prod(degrees)) else stages - 1
    return (micro_batches + bubbles) * seconds / stages

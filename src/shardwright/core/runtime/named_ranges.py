"""Named ranges in a trace of `torch.profiler`: operators, redistributions, buckets and stages.

| range | contents |
|---|---|
| `net.hidden1` | an operator, by its module path |
| `send all_reduce over tp, 4096 B` | a collective is started, or run in one call |
| `wait for all_reduce over tp` | the result of a collective is waited for |
| `bucket 2` | a bucket of parameters is gathered, or its gradients reduced |
| `schedule` | a pipeline stage runs its chunks on all micro-batches, and waits for other stages |
| `forward of chunk 1, micro-batch 0` | one pass of a chunk; or `backward`, or `weights` |

Only programs lowered for `Devices` with `named_ranges` contain the ranges; other programs have no
overhead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules.rule import Reduce, Reduction
from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.runtime.collectives import BoundCollective, Collective

SCHEDULE = "schedule"
PASSES = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}
"""Names of the passes of one micro-batch, by the method of PyTorch's stages that runs the pass."""

SEND = re.compile(r"send (?P<kind>\w+) over (?P<over>.+), (?P<bytes>\d+) B")
WAIT = re.compile(r"wait for (?P<kind>\w+) over (?P<over>.+)")
BUCKET = re.compile(r"bucket \d+")
PASS = re.compile(r"(forward|backward|weights) of chunk \d+, micro-batch \d+")


@dataclass(frozen=True)
class CollectiveRange:
    """Profiler ranges of one type of collective over given mesh axes.

    Args:
        collective: name of the collective in `COLLECTIVES`.
        over: names of the axes.
        size: number of ranks of the group over the axes.
    """

    collective: str
    over: str
    size: int

    @classmethod
    def of(cls, collective: str, axes: Axes, matrix: DeviceMatrix) -> CollectiveRange:
        # Sorted, so that a group has one name, whatever the order in which its axes shard.
        return cls(collective, matrix.named(tuple(sorted(axes))), matrix.size(axes))

    def send(self, num_bytes: int) -> record_function:
        """Return the profiler range around the start of the collective.

        Args:
            num_bytes: bytes of this rank's input to the collective.
        """
        # The bytes sent by an all-gather are computed from its output, which is larger.
        buffer_bytes = num_bytes * self.size if self.collective == "all_gather" else num_bytes
        sent = COLLECTIVES[self.collective].sent_volume(buffer_bytes, self.size)
        return record_function(f"send {self.collective} over {self.over}, {sent} B")

    def wait(self) -> record_function:
        """Return the range around the wait for the collective."""
        return record_function(f"wait for {self.collective} over {self.over}")

    def wrap(self, collective: Collective) -> Collective:
        """Return `collective` with `start` and `finish` wrapped in the ranges `send` and `wait`."""

        def start(x: Tensor) -> Tensor:
            with self.send(x.nbytes):
                return collective.start(x)

        def finish(pending: Tensor, dtype: Any) -> Tensor:
            with self.wait():
                return collective.finish(pending, dtype)

        return replace(collective, start=start, finish=finish)


def wrap_step(
    bound: BoundCollective,
    forward: str | None,
    backward: str | None,
    axes: Axes,
    matrix: DeviceMatrix,
) -> BoundCollective:
    """Return a redistribution step with its collectives wrapped in named ranges.

    Args:
        bound: the redistribution step.
        forward, backward: names of the collectives in the forward and in the backward pass; None
            for a pass without communication.
        axes: the mesh axes over which the step communicates.
        matrix: the device matrix.
    """

    def wrap(collective: Collective, name: str | None) -> Collective:
        return (
            collective if name is None else CollectiveRange.of(name, axes, matrix).wrap(collective)
        )

    return BoundCollective(wrap(bound.forward, forward), wrap(bound.backward, backward))


def wrap_reduction(
    reduce: Reduce, reduction: Reduction, axes: Axes, matrix: DeviceMatrix
) -> Reduce:
    """Return `reduce`, the bound collective of a kernel, wrapped in named ranges."""
    collective, run = reduction.collective, reduce.run
    collective_range = CollectiveRange.of(collective, axes, matrix)

    def start(x: Tensor) -> Tensor:
        with collective_range.send(x.nbytes):
            return reduce.start(x)

    def end(x: Tensor) -> Tensor:
        with collective_range.wait():
            return reduce.end(x)

    if isinstance(run, BoundCollective):
        # The gradient of a result that does not vary is complete on each rank.
        backward = reduction.backward_collective if reduction.varying else None
        run = wrap_step(run, collective, backward, axes, matrix)
        return Reduce(run, start, end, reduce.call_site)
    # Without a gradient, as of a maximum.
    return Reduce(lambda x: end(start(x)), start, end, reduce.call_site)


def wrap_pass(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a pipeline stage wrapped in a named range.

    Args:
        name: name of the range, without the micro-batch.
        function: the method, whose first argument is the index of the micro-batch.
    """

    def call(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{name}, micro-batch {micro_batch}"):
            return function(micro_batch, *args, **kwargs)

    return call


@dataclass(frozen=True, eq=False)
class RangedBucket(BoundBucket):
    """A bucket whose collectives are wrapped in named ranges."""

    matrix: DeviceMatrix

    @classmethod
    def of(cls, bound: BoundBucket, matrix: DeviceMatrix) -> RangedBucket:
        return cls(bound.bucket, bound.gathers, bound.replicas, matrix)

    @cached_property
    def _all_gather_range(self) -> CollectiveRange:
        return self._make_collective_range(
            "all_gather", [gather.group.axes for gather in self.gathers]
        )

    @cached_property
    def _reduce_scatter_range(self) -> CollectiveRange:
        axes = [gather.group.axes for gather in self.gathers if gather.reduces]
        return self._make_collective_range("reduce_scatter", axes)

    @cached_property
    def _all_reduce_range(self) -> CollectiveRange:
        assert self.replicas is not None
        return self._make_collective_range("all_reduce", [self.replicas.axes])

    def _make_collective_range(self, name: str, axes: Sequence[Axes]) -> CollectiveRange:
        return CollectiveRange.of(name, tuple({a for each in axes for a in each}), self.matrix)

    @property
    def _shard_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def _bucket_range(self) -> record_function:
        return record_function(f"bucket {self.bucket.number}")

    def start_gather(self, shards: Sequence[Tensor]) -> Tensor:
        with self._bucket_range, self._all_gather_range.send(self._shard_bytes):
            return super().start_gather(shards)

    def finish_gather(self, pending: Tensor) -> list[Tensor]:
        with self._bucket_range, self._all_gather_range.wait():
            return super().finish_gather(pending)

    def reduce(self, gradients: Sequence[Tensor | None]) -> Tensor:
        with self._bucket_range:
            if self._has_reduce_scatter:
                # The all-reduce over replicas then starts in `sum_replicas`.
                with self._reduce_scatter_range.send(
                    self._shard_bytes * self._reduce_scatter_range.size
                ):
                    return super().reduce(gradients)
            if self.replicas is not None:
                with self._all_reduce_range.send(self._shard_bytes):
                    return super().reduce(gradients)
            # Each rank keeps its block of an equal gradient: nothing is sent.
            return super().reduce(gradients)

    def sum_replicas(self, flat: Tensor) -> Tensor:
        if not self._has_reduce_scatter:
            return super().sum_replicas(flat)
        # Wait here, so that the range covers only the wait; the wait in `super()` returns at once.
        with self._bucket_range:
            with self._reduce_scatter_range.wait():
                flat = self._wait_for_collective(flat)
            if self.replicas is None:
                return flat
            with self._all_reduce_range.send(flat.nbytes):
                return super().sum_replicas(flat)

    def shard_gradients(self, flat: Tensor) -> list[Tensor]:
        # The waits, if any, were in `sum_replicas`.
        if self.replicas is None:
            return super().shard_gradients(flat)
        with self._bucket_range, self._all_reduce_range.wait():
            return super().shard_gradients(flat)

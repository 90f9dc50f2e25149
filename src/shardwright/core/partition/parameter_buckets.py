"""Buckets of parameters, which are gathered and whose gradients are reduced together.

The first `vary` and `all_gather` steps of parameters' routes are made for a bucket at once: one
all-gather of the parameters, and for their gradients one reduce-scatter (if stored sharded), one
all-reduce (if not), or both, with the all-reduce on shards (HSDP).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.core.graph.graph import Graph, Kind, Value
from shardwright.core.graph.saved_tensors import needed_in_backward
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.layout.redistribution import RedistributionStep
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.transfer import Transfer

IN_BUCKETS = ("vary", "all_gather")
"""Kinds of steps that buckets make. `vary` comes first, so that the all-reduce is of shards."""


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter in a bucket, for one of the layouts in which it is used.

    Args:
        name: name of the parameter; `name@2` for the second layout in which it is used.
        stored: storage layout.
        transfers: steps of its route that the bucket makes.
    """

    name: str
    value: Value
    stored: TensorLayout
    transfers: tuple[Transfer, ...]

    @property
    def used(self) -> TensorLayout:
        """Layout after the bucket's steps."""
        return self.transfers[-1].step.target

    @property
    def steps(self) -> tuple[RedistributionStep, ...]:
        return tuple(transfer.step for transfer in self.transfers)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose collectives are joined; all make the same kinds of steps over the same axes.

    Args:
        number: index in order of first use.
        level: ZeRO level; empty without ZeRO.
        segment: recomputed segment that contains all uses of the bucket (`level3` only).
        regathers: whether it is gathered again in the backward pass.
        trained: whether gradients of the graph's `trained` outputs flow into it.
    """

    number: int
    members: tuple[Member, ...]
    level: str = ""
    segment: str | None = None
    regathers: bool = False
    trained: bool = True

    @property
    def steps(self) -> tuple[RedistributionStep, ...]:
        """Steps of the first member; those of other members differ in tensor dimensions only."""
        return self.members[0].steps

    @property
    def gathers(self) -> bool:
        return any(step.kind == "all_gather" for step in self.steps)

    @property
    def reduces_once(self) -> bool:
        """Whether unsharded gradients accumulate over micro-batches and are reduced once a step."""
        return not self.gathers or self.level not in ("level2", "level3")

    @property
    def numel(self) -> int:
        """Elements that one device stores."""
        return sum(prod(m.stored.shard_shape(m.value.shape)) for m in self.members)

    @property
    def gather_bytes(self) -> int:
        """Bytes that one device sends to gather it once."""
        total, local = 0, self.numel * self.members[0].value.itemsize
        for step in self.steps:
            if step.kind == "all_gather":
                total += (step.group_size - 1) * local
                local *= step.group_size
        return total

    @property
    def reduce_bytes(self) -> int:
        """Bytes that one device sends to reduce its gradients once, if they are trained."""
        if not self.trained:
            return 0
        total, local = 0, self.numel * self.members[0].value.itemsize
        for step in self.steps:
            if step.kind == "vary":
                # Ring all-reduce: 2 (n - 1) / n of the tensor, rounded up.
                total -= -2 * (step.group_size - 1) * local // step.group_size
            else:
                total += (step.group_size - 1) * local if step.backward else 0
                local *= step.group_size
        return total

    def step_bytes(self, micro_batches: int) -> tuple[int, int]:
        """Bytes that one device sends in a step, forward and backward."""
        runs = micro_batches if self.level == "level3" else 1
        gathered = self.gather_bytes
        reduces = 1 if self.reduces_once else micro_batches
        backward = reduces * self.reduce_bytes + (micro_batches * gathered if self.regathers else 0)
        return runs * gathered, backward


def bucketed_steps(route: Sequence[Transfer]) -> int:
    """Number of leading steps of a parameter's route that a bucket makes: at most one `vary`, then
    gathers."""
    length = 0
    for transfer in route:
        kind = transfer.step.kind
        if kind not in IN_BUCKETS or (kind == "vary" and length):
            break
        length += 1
    return length


def buckets(
    graph: Graph,
    mesh: DeviceMatrix,
    decisions: Decisions,
    routes: Mapping[tuple[str, int], tuple[Transfer, ...]],
    stored: Mapping[Value, TensorLayout],
    returned: Iterable[tuple[Value, tuple[Transfer, ...]]] = (),
) -> tuple[Bucket, ...]:
    """Group parameters into buckets in order of use, up to `decisions.bucket_bytes` of parameters
    in the layout in which they are used.

    Args:
        routes: transfers to each input of an operator.
        stored: storage layouts.
        returned: values that the program returns, with their transfers; they may be parameters.
    """
    level = decisions.sharding.level if decisions.sharding is not None else ""
    uses: dict[tuple[Value, tuple[int, ...]], _BucketedUse] = {}
    # Only level3 frees gathered parameters, and has to gather again those that autograd has saved.
    needed = needed_in_backward(graph) if level == "level3" else frozenset()
    for op in graph.ops:
        for index, value in enumerate(op.inputs):
            if value.kind is not Kind.PARAMETER:
                continue
            route = routes[op.name, index]
            route = route[: bucketed_steps(route)]
            if not route:
                continue
            recompute = decisions.recompute.get(op.name)
            segment = recompute.segment if recompute and level == "level3" else None
            key = (value, tuple(id(transfer) for transfer in route))
            use = uses.setdefault(key, _BucketedUse(value, route, segment))
            # Used in several segments, or outside of them: gathered once for all uses.
            if use.segment != segment:
                use.segment = None
            use.needed |= (op.name, index) in needed
            use.trained |= value.requires_grad and any(v.requires_grad for v in op.outputs)
    for value, route in returned:
        route = route[: bucketed_steps(route)]
        if value.kind is Kind.PARAMETER and route:
            key = (value, tuple(id(transfer) for transfer in route))
            use = uses.setdefault(key, _BucketedUse(value, route, None))
            # The caller reads it after the program, so it is gathered outside of segments.
            use.segment, use.trained = None, use.trained or route[-1].trained
    return _group_uses(uses.values(), stored, level, decisions.bucket_bytes)


@dataclass
class _BucketedUse:
    """A use of a parameter, before uses are grouped into buckets."""

    value: Value
    route: tuple[Transfer, ...]
    segment: str | None
    needed: bool = False
    trained: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for uses that can share a bucket."""
        steps = tuple((t.step.kind, t.step.axes, t.step.backward) for t in self.route)
        value = self.value
        segment = self.segment if any(kind == "all_gather" for kind, _, _ in steps) else None
        # A bucket reduces the gradients of all its members or of none.
        gradients = value.differentiable, self.trained
        return steps, value.dtype, value.stored_dtype, gradients, segment


def _group_uses(
    uses: Iterable[_BucketedUse], stored: Mapping[Value, TensorLayout], level: str, limit: int
) -> tuple[Bucket, ...]:
    groups: list[list[_BucketedUse]] = []
    open_groups: dict[tuple[object, ...], tuple[list[_BucketedUse], int]] = {}
    for use in uses:
        size = _used_bytes(use)
        # In order of use, so that a bucket is gathered shortly before all its parameters are read
        # and reduced as soon as the last gradient is there.
        group, filled = open_groups.get(use.key, ([], 0))
        # A parameter above the limit gets a bucket of its own.
        if not group or filled + size > limit:
            group, filled = [], 0
            groups.append(group)
        group.append(use)
        open_groups[use.key] = (group, filled + size)
    num_uses: dict[Value, int] = {}

    def member(use: _BucketedUse) -> Member:
        count = num_uses[use.value] = num_uses.get(use.value, 0) + 1
        name = use.value.name if count == 1 else f"{use.value.name}@{count}"
        return Member(name, use.value, stored[use.value], use.route)

    result = []
    for number, group in enumerate(groups):
        gathers = any(t.step.kind == "all_gather" for t in group[0].route)
        segment = group[0].segment if gathers else None
        trained = group[0].trained
        regathers = level == "level3" and gathers and trained
        # In a segment the rerun gathers it; elsewhere only if autograd saves a member.
        regathers = regathers and (segment is not None or any(use.needed for use in group))
        result.append(Bucket(number, tuple(map(member, group)), level, segment, regathers, trained))
    return tuple(result)


def _used_bytes(use: _BucketedUse) -> int:
    used = use.route[-1].step.target
    return prod(used.shard_shape(use.value.shape)) * use.value.itemsize


def varying_axes(bucket: Bucket) -> Axes:
    """Axes over which a bucket's gradients are all-reduced."""
    return next((step.axes for step in bucket.steps if step.kind == "vary"), ())

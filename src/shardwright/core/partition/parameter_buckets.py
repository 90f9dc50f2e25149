"""Buckets: groups of parameters that are gathered, and whose gradients are reduced, together.

A bucket coalesces the first `vary` and `all_gather` steps of the routes of its parameters into one
all-gather. Their gradients have one reduce-scatter if they are stored sharded, one all-reduce if
they are replicated, or both, with the all-reduce on shards (HSDP).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from shardwright.core.graph.graph import Graph, Origin, Value
from shardwright.core.graph.saved_tensors import needed_in_backward
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.transfer import Transfer

MIN_BUCKETS = 2
"""Minimum number of buckets of a program, since the reduction of a single bucket starts after the
backward pass and overlaps nothing. Not more, since each bucket costs a collective: with four, a
step of a small model takes up to 3% more CPU time on processes that share cores."""

SMALL_BUCKET_BYTES = 2**20
"""Bucket size in bytes below which latency outweighs overlap: the size of the first bucket of
`DistributedDataParallel`."""

BUCKETED_OPERATIONS = ("vary", "all_gather")
"""Types of steps that are coalesced in buckets. `vary` comes first in a route, so that the
all-reduce, which is its backward pass, operates on shards."""


@dataclass(frozen=True, eq=False)
class BucketMember:
    """A parameter in a bucket of coalesced collectives, for one of the layouts in which it is used.

    Args:
        name: name of the parameter; `name@2` for the second layout in which it is used.
        value: the parameter.
        stored_layout: storage layout of the parameter.
        transfers: transfers of the route of the parameter that are coalesced in the bucket.
    """

    name: str
    value: Value
    stored_layout: TensorLayout
    transfers: tuple[Transfer, ...]

    @property
    def used_layout(self) -> TensorLayout:
        """Layout of the parameter after the steps of the bucket."""
        return self.transfers[-1].step.target

    @property
    def steps(self) -> tuple[RedistributionStep, ...]:
        """Redistribution steps of the parameter that the bucket coalesces."""
        return tuple(transfer.step for transfer in self.transfers)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose collectives have equal types and mesh axes, and are coalesced.

    Args:
        number: index of the bucket in order of first use.
        level: ZeRO level; empty without ZeRO.
        segment: name of the recomputed segment with all operators that read the parameters, with
            `level3`; None if no segment contains them all.
        regathers: whether the parameters are gathered again in the backward pass.
        trained: whether the backward pass from `Graph.trained` computes gradients of the
            parameters.
    """

    number: int
    members: tuple[BucketMember, ...]
    level: str = ""
    segment: str | None = None
    regathers: bool = False
    trained: bool = True

    @property
    def steps(self) -> tuple[RedistributionStep, ...]:
        """Redistribution steps of the first member; those of other members differ at most in the
        tensor dimensions that they shard."""
        return self.members[0].steps

    @property
    def gathers(self) -> bool:
        """Whether the parameters are stored sharded, and all-gathered before use."""
        return any(step.operation == "all_gather" for step in self.steps)

    @property
    def reduces_once(self) -> bool:
        """Whether unsharded gradients accumulate over micro-batches and are reduced once per
        step."""
        return not self.gathers or self.level not in ("level2", "level3")

    @property
    def numel(self) -> int:
        """Number of elements of all parameters that one device stores."""
        return sum(prod(m.stored_layout.shard_shape(m.value.shape)) for m in self.members)

    @property
    def gather_bytes(self) -> int:
        """Bytes that one device sends to gather the parameters once."""
        # In the dtype of use, to which shards are cast before they are gathered.
        total, local = 0, self.numel * self.members[0].value.itemsize
        for step in self.steps:
            if step.operation == "all_gather":
                # Ring all-gather: a device sends n - 1 shards, whose size grows with each step.
                total += (step.group_size - 1) * local
                local *= step.group_size
        return total

    @property
    def reduce_bytes(self) -> int:
        """Bytes that one device sends to reduce the gradients once; 0 unless `trained`."""
        if not self.trained:
            return 0
        total, local = 0, self.numel * self.members[0].value.itemsize
        for step in self.steps:
            if step.operation == "vary":
                # Ring all-reduce: a device sends 2 (n - 1) / n of the tensor, rounded up.
                total -= -2 * (step.group_size - 1) * local // step.group_size
            else:
                # The gradient of an all-gather is a reduce-scatter, which sends as many bytes, or a
                # local slice where replicas have equal gradients.
                total += (step.group_size - 1) * local if step.backward else 0
                local *= step.group_size
        return total

    def step_bytes(self, micro_batches: int) -> tuple[int, int]:
        """Return the bytes that one device sends for the bucket per step, (forward, backward)."""
        # Only `level3` frees gathered parameters between micro-batches.
        num_gathers = micro_batches if self.level == "level3" else 1
        num_reductions = 1 if self.reduces_once else micro_batches
        regather_bytes = micro_batches * self.gather_bytes if self.regathers else 0
        backward = num_reductions * self.reduce_bytes + regather_bytes
        return num_gathers * self.gather_bytes, backward


def num_bucketed_steps(route: Sequence[Transfer]) -> int:
    """Return the number of leading transfers of a parameter's route that a bucket coalesces: at
    most one `vary`, then all-gathers."""
    # A `vary` after a gather would all-reduce the gathered gradient, which is larger than the
    # shard's.
    length = 0
    for transfer in route:
        operation = transfer.step.operation
        if operation not in BUCKETED_OPERATIONS or (operation == "vary" and length):
            break
        length += 1
    return length


def buckets(
    graph: Graph,
    mesh: DeviceMatrix,
    decisions: Decisions,
    routes: Mapping[tuple[str, int], tuple[Transfer, ...]],
    stored_layouts: Mapping[Value, TensorLayout],
    returned_routes: Iterable[tuple[Value, tuple[Transfer, ...]]] = (),
) -> tuple[Bucket, ...]:
    """Return the buckets of all parameters, in order of first use.

    A bucket has at most `decisions.bucket_bytes` of gathered parameters, or a single larger
    parameter. Parameters are divided evenly into buckets of about half of all gathered parameters,
    or 1 MiB if that is more, so that there are several buckets to overlap.

    Args:
        routes: transfers to each input of an operator, by (operator name, input index).
        stored_layouts: storage layout of each parameter.
        returned_routes: (value, transfers) of each value that the program returns, parameters
            included.
    """
    # One use per parameter and layout: consumers that share transfers share the gather.
    level = decisions.sharding.level if decisions.sharding is not None else ""
    uses: dict[tuple[Value, tuple[int, ...]], _BucketedParameterUse] = {}
    # Only level3 frees gathered parameters, and gathers them again if the backward pass reads them.
    read_in_backward = needed_in_backward(graph) if level == "level3" else frozenset()
    for op in graph.ops:
        for index, value in enumerate(op.inputs):
            if value.origin is not Origin.PARAMETER:
                continue
            route = routes[op.name, index]
            route = route[: num_bucketed_steps(route)]
            if not route:
                continue
            recompute = decisions.recompute.get(op.name)
            # With other levels the gathered parameter outlives the segment, which only reads it.
            segment = recompute.segment if recompute and level == "level3" else None
            key = (value, tuple(id(transfer) for transfer in route))
            use = uses.setdefault(key, _BucketedParameterUse(value, route, segment))
            # A parameter that is used in several segments, or outside of segments, is gathered once
            # for all uses.
            if use.segment != segment:
                use.segment = None
            use.is_read_in_backward |= (op.name, index) in read_in_backward
            use.trained |= value.requires_grad and any(v.requires_grad for v in op.outputs)
    for value, route in returned_routes:
        route = route[: num_bucketed_steps(route)]
        if value.origin is Origin.PARAMETER and route:
            key = (value, tuple(id(transfer) for transfer in route))
            use = uses.setdefault(key, _BucketedParameterUse(value, route, None))
            # The caller reads a returned parameter, so it is gathered outside of segments.
            use.segment, use.trained = None, use.trained or route[-1].trained
    # A step has at least `MIN_BUCKETS` buckets to overlap, unless latency would outweigh the
    # overlap.
    mean_bytes = max(
        sum(map(_count_gathered_bytes, uses.values())) // MIN_BUCKETS, SMALL_BUCKET_BYTES
    )
    groups = _group_uses_into_buckets(uses.values(), mean_bytes, decisions.bucket_bytes)
    recomputed = frozenset(
        decisions.recompute[op.name].segment
        for op in graph.ops
        if op.name in decisions.recompute and any(v.requires_grad for v in op.outputs)
    )
    return _make_buckets(groups, stored_layouts, level, recomputed)


@dataclass
class _BucketedParameterUse:
    """Use of a parameter in one layout, before uses are grouped into buckets.

    Args:
        value: the parameter.
        route: transfers of the parameter to this layout that are coalesced in a bucket.
        segment: name of the recomputed segment with all operators that read this layout; None if no
            segment contains them all.
        is_read_in_backward: whether the backward pass reads the gathered parameter (`level3` only).
        trained: whether the backward pass from `Graph.trained` computes a gradient of the
            parameter.
    """

    value: Value
    route: tuple[Transfer, ...]
    segment: str | None
    is_read_in_backward: bool = False
    trained: bool = False

    @property
    def bucket_key(self) -> tuple[object, ...]:
        """Hashable key that is equal for uses that can share a bucket."""
        steps = tuple((t.step.operation, t.step.axes, t.step.backward) for t in self.route)
        value = self.value
        # A segment repeats gathers only, so other steps share buckets across segments.
        segment = self.segment if any(name == "all_gather" for name, _, _ in steps) else None
        # A bucket reduces the gradients of all members or of none.
        gradients = value.differentiable, self.trained
        return steps, value.dtype, value.stored_dtype, gradients, segment


def _group_uses_into_buckets(
    uses: Iterable[_BucketedParameterUse], mean_bytes: int, max_bytes: int
) -> list[list[_BucketedParameterUse]]:
    """Divide uses with equal keys evenly into groups of about `mean_bytes` and at most `max_bytes`.

    Groups are in order of first use, so that a bucket is gathered shortly before all of its
    parameters are read, and reduced as soon as the last gradient is computed.
    """
    # Uses with different keys alternate, such as weights and norms that are sharded over different
    # axes.
    uses_of_key: dict[tuple[object, ...], list[tuple[int, _BucketedParameterUse]]] = {}
    for position, use in enumerate(uses):
        uses_of_key.setdefault(use.bucket_key, []).append((position, use))
    groups = [
        group
        for numbered_uses in uses_of_key.values()
        for group in _divide_evenly(numbered_uses, min(mean_bytes, max_bytes), max_bytes)
    ]
    groups.sort(key=lambda group: group[0][0])
    return [[use for _, use in group] for group in groups]


def _divide_evenly(
    numbered_uses: Sequence[tuple[int, _BucketedParameterUse]], mean_bytes: int, max_bytes: int
) -> list[list[tuple[int, _BucketedParameterUse]]]:
    """Divide uses into consecutive groups, without a small last one: each bucket costs a
    collective."""
    sizes = [_count_gathered_bytes(use) for _, use in numbered_uses]
    remaining_bytes = sum(sizes)
    remaining_groups = ceil(remaining_bytes / mean_bytes)
    groups: list[list[tuple[int, _BucketedParameterUse]]] = [[]]
    group_bytes = 0
    for numbered_use, size in zip(numbered_uses, sizes, strict=True):
        # A group ends where it is closest to an equal part of what is left.
        is_complete = remaining_groups > 1 and (
            (group_bytes + size / 2) * remaining_groups > remaining_bytes
        )
        # A parameter larger than `max_bytes` is the only member of its bucket.
        if group_bytes and (is_complete or group_bytes + size > max_bytes):
            groups.append([])
            remaining_bytes -= group_bytes
            remaining_groups -= 1
            group_bytes = 0
        groups[-1].append(numbered_use)
        group_bytes += size
    return groups


def _make_buckets(
    groups: Iterable[Sequence[_BucketedParameterUse]],
    stored_layouts: Mapping[Value, TensorLayout],
    level: str,
    recomputed_segments: frozenset[str],
) -> tuple[Bucket, ...]:
    num_uses: dict[Value, int] = {}

    def member(use: _BucketedParameterUse) -> BucketMember:
        count = num_uses[use.value] = num_uses.get(use.value, 0) + 1
        name = use.value.name if count == 1 else f"{use.value.name}@{count}"
        return BucketMember(name, use.value, stored_layouts[use.value], use.route)

    result = []
    for number, group in enumerate(groups):
        gathers = any(t.step.operation == "all_gather" for t in group[0].route)
        segment = group[0].segment if gathers else None
        # The same for all members, as it is part of `bucket_key`.
        trained = group[0].trained
        # Recomputing a segment gathers all its parameters, frozen ones too. Outside of segments,
        # they are gathered again only if they are trained and the backward pass reads one of them.
        if segment is not None:
            is_read = segment in recomputed_segments
        else:
            is_read = trained and any(use.is_read_in_backward for use in group)
        regathers = level == "level3" and gathers and is_read
        result.append(Bucket(number, tuple(map(member, group)), level, segment, regathers, trained))
    return tuple(result)


def _count_gathered_bytes(use: _BucketedParameterUse) -> int:
    """Return the bytes of the gathered parameter on a device."""
    layout = use.route[-1].step.target
    return prod(layout.shard_shape(use.value.shape)) * use.value.itemsize


def varying_axes(bucket: Bucket) -> Axes:
    """Return the axes over which the gradients of a bucket are all-reduced; () without an
    all-reduce."""
    # The first suffices: a bucket has at most one `vary` (`num_bucketed_steps`).
    return next((step.axes for step in bucket.steps if step.operation == "vary"), ())

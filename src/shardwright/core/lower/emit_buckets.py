"""Emit the lines of a program that gather parameters and reduce their gradients in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.core.graph.graph import Origin, Value
from shardwright.core.lower.emit import Source
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.parameter_buckets import Bucket, BucketMember, num_bucketed_steps
from shardwright.core.partition.transfer import Transfer
from shardwright.core.runtime.bucket_autograd import (
    EnterBucket,
    FinishGather,
    ReuseGathered,
    StartGather,
    UseAsStored,
)
from shardwright.core.runtime.buckets import BoundBucket, bind_bucket
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.named_ranges import RangedBucket
from shardwright.core.runtime.regather import BackwardRegather


@dataclass
class BucketLines:
    """Emitter of the lines that gather parameters and reduce gradients in buckets.

    The gather of a bucket starts before the gather of the previous bucket is finished, and is
    finished at the first use of a member. If gradients of a bucket are all-reduced over replicas,
    its local shards enter the autograd graph at the top of the program, so that the backward pass
    waits for the all-reduces at its end. Shards of other buckets enter just before their gather,
    since their gradients are complete after the reduce-scatter.

    A program that reads parameters from `UnshardedParameters` omits the buckets that are reduced
    once per step: their members are passed to the program in the layouts of their uses. Members of
    `level2` buckets are passed gathered, and the program reduces only their gradients.

    Args:
        communication: the communication of the program, with its buckets.
        devices: this rank's view of the devices.
        unsharded: whether the program reads parameters from `UnshardedParameters`.
        source: the source text to which lines are added.
        read_locally: values that a `local_map` reads.
        bound: the buckets, bound to process groups.
        regather: all-gathers buckets again in the backward pass; None if no bucket is regathered.
    """

    communication: Communication
    devices: Devices
    unsharded: bool
    source: Source
    read_locally: frozenset[Value] = frozenset()
    bound: tuple[BoundBucket, ...] = ()
    regather: BackwardRegather | None = None
    _entry_variables: dict[Bucket, str] = field(default_factory=dict)
    _gather_variables: dict[Bucket, str] = field(default_factory=dict)
    _member_variables: dict[BucketMember, str] = field(default_factory=dict)
    _turn_variable: str = ""
    _bucket_of: dict[tuple[Value, tuple[int, ...]], tuple[Bucket, BucketMember]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.bound = tuple(
            bind_bucket(bucket, self.devices) for bucket in self.communication.buckets
        )
        if self.devices.named_ranges:
            self.bound = tuple(RangedBucket.of(b, self.devices.matrix) for b in self.bound)
        for bucket in self.communication.buckets:
            for member in bucket.members:
                # By the identity of transfers, as a parameter that is read in two layouts is a
                # member of two buckets.
                self._bucket_of[member.value, _get_transfer_ids(member.transfers)] = (
                    bucket,
                    member,
                )
        # A recomputed segment gathers its buckets again by itself.
        if any(
            bucket.regathers and bucket.segment is None for bucket in self.communication.buckets
        ):
            self.regather = BackwardRegather()

    def enter(self) -> None:
        """Emit the first lines of a program, whose backward pass runs last: local shards of
        all-reduced buckets enter the autograd graph."""
        for bound in self._program_buckets:
            # Lines at the top run last in the backward pass: reductions overlap all of it.
            if not bound.bucket.gathers or bound.replicas is not None:
                self._emit_bucket_entry(bound)
        # The first gather cannot overlap the use of an earlier bucket, so it starts at once.
        first = next((b.bucket for b in self._program_buckets if _can_prefetch(b.bucket)), None)
        if first is not None:
            self._emit_gather_start(first)

    @cached_property
    def _program_buckets(self) -> tuple[BoundBucket, ...]:
        """Buckets that the program gathers or reduces; `UnshardedParameters` handles the others."""
        return tuple(each for each in self.bound if self._is_bucket_in_program(each.bucket))

    def _is_bucket_in_program(self, bucket: Bucket) -> bool:
        return not (self.unsharded and bucket.reduces_once)

    def _emit_bucket_entry(self, bound: BoundBucket) -> str:
        number = bound.bucket.number
        name = self._entry_variables[bound.bucket] = self.source.name(f"bucket_{number}")
        function = self.source.refer(f"enter_{number}", EnterBucket(bound))
        shards = ", ".join(f"parameters[{m.value.name!r}]" for m in bound.bucket.members)
        self.source.add([name], f"{function}({shards})", [], _format_bucket_comment(bound))
        return name

    def member(self, value: Value, route: Sequence[Transfer]) -> str | None:
        """Emit the gather of the bucket of parameter `value`, and return the variable of `value`.

        Returns None if no step of `route` is in a bucket.
        """
        # Buckets coalesce parameters only: activations do not exist at the same time.
        num_bucketed = num_bucketed_steps(route) if value.origin is Origin.PARAMETER else 0
        if not num_bucketed:
            return None
        bucket, member = self._bucket_of[value, _get_transfer_ids(route[:num_bucketed])]
        if member not in self._member_variables:
            if self._is_bucket_in_program(bucket):
                self._emit_bucket_members(bucket)
            else:
                # `UnshardedParameters` has gathered it for all micro-batches of the step.
                name = self._member_variables[member] = self.source.name(member.name)
                self.source.add([name], f"parameters[{used_member_key(member)!r}]", [])
        return self._member_variables[member]

    def _emit_gather_start(self, bucket: Bucket) -> None:
        if bucket in self._gather_variables:
            return
        # Buckets without all-reduce enter just before their gather; see the class docstring.
        entered = self._entry_variables.get(bucket) or self._emit_bucket_entry(
            self.bound[bucket.number]
        )
        bound, number = self.bound[bucket.number], bucket.number
        name = self._gather_variables[bucket] = self.source.name(f"bucket_{number}")
        arguments = [entered]
        # `UnshardedParameters` gathers once per step; the bucket only reduces gradients.
        if self.unsharded and bucket.level == "level2":
            function = self.source.refer(f"reuse_{number}", ReuseGathered(bound))
            arguments.append(f"parameters[{gathered_bucket_key(bucket)!r}]")
        else:
            function = self.source.refer(f"start_{number}", StartGather(bound))
        names, reads = [name], [entered]
        self._add_turn(bucket, names, arguments, reads)
        call = f"{function}({', '.join(arguments)})"
        self.source.add(names, call, reads, unpack=len(names) > 1, segment=bucket.segment)

    def _add_turn(
        self, bucket: Bucket, names: list[str], arguments: list[str], reads: list[str]
    ) -> None:
        """Add the turn to the results, arguments and variables that a call on `bucket` reads, if a
        `local_map` reads a member."""
        # A recomputed segment is a function of its own, which no turn enters or leaves.
        if bucket.segment is not None or not any(
            member.value in self.read_locally for member in bucket.members
        ):
            return
        arguments.append(self._turn_variable or "torch.empty(0)")
        reads += [self._turn_variable] if self._turn_variable else []
        self._turn_variable = self.source.name("turn")
        names.append(self._turn_variable)

    def _emit_bucket_members(self, bucket: Bucket) -> None:
        bound, number = self.bound[bucket.number], bucket.number
        # ZeRO-2 keeps gathered parameters for the step, but reduces the gradients of each
        # micro-batch.
        is_cached = self.unsharded and bucket.level == "level2"
        if bucket.gathers:
            self._emit_gather_start(bucket)
            # Start before the wait, so that the next gather overlaps the use of this bucket.
            following = self._find_bucket_to_prefetch(bucket)
            if following is not None:
                self._emit_gather_start(following)
        bucket_variable = self._gather_variables.get(bucket) or self._entry_variables[bucket]
        if bucket.gathers and not is_cached:
            # Recomputing a segment gathers its buckets again anyway.
            regather = self.regather if bucket.regathers and bucket.segment is None else None
            function = self.source.refer(f"finish_{number}", FinishGather(bound, regather))
        else:
            function = self.source.refer(f"finish_{number}", UseAsStored(bound, is_cached))
        names = [self.source.name(member.name) for member in bucket.members]
        # All members at once, so that later uses of any of them emit nothing.
        self._member_variables.update(zip(bucket.members, names, strict=True))
        arguments, reads = [bucket_variable], [bucket_variable]
        self._add_turn(bucket, names, arguments, reads)
        call = f"{function}({', '.join(arguments)})"
        self.source.add(names, call, reads, unpack=True, segment=bucket.segment)

    def _find_bucket_to_prefetch(self, bucket: Bucket) -> Bucket | None:
        """Return the bucket whose gather starts before `bucket` is used, or None."""
        if bucket.segment is not None:
            return None
        # Buckets are numbered in order of first use.
        later_buckets = (b.bucket for b in self._program_buckets if b.bucket.number > bucket.number)
        return next(filter(_can_prefetch, later_buckets), None)


def _can_prefetch(bucket: Bucket) -> bool:
    """Whether the gather of a bucket can start early; recomputed segments gather their own
    buckets."""
    return bucket.gathers and bucket.segment is None


def used_member_key(member: BucketMember) -> str:
    """Return the key of a gathered parameter, in the layout that operators read, in
    `UnshardedParameters.tensors`."""
    return f"{member.name} as used"


def cast_key(value: Value) -> str:
    """Return the key of a parameter without a bucket, cast to the dtype that operators read, in
    `UnshardedParameters.tensors`."""
    return f"{value.name} as {str(value.dtype).removeprefix('torch.')}"


def gathered_bucket_key(bucket: Bucket) -> str:
    """Return the key of the gathered parameters of a `level2` (ZeRO-2) bucket in
    `UnshardedParameters.tensors`."""
    return f"bucket {bucket.number}"


def _get_transfer_ids(transfers: Sequence[Transfer]) -> tuple[int, ...]:
    return tuple(id(transfer) for transfer in transfers)


def _format_bucket_comment(bound: BoundBucket) -> str:
    """Describe the collectives of a bucket, forward / backward.

    Example: `bucket 0 of 3 parameters: vary over dp, all_gather over fsdp / reduce_scatter`.
    """
    bucket, steps = bound.bucket, []
    for step in bucket.steps:
        axes = step.source.layout.named(step.axes)
        gradient = f" / {step.backward}" if step.backward is not None else ""
        steps.append(f"{step.operation} over {axes}{gradient}")
    count = len(bucket.members)
    regathers = ", gathered again in the backward pass" if bucket.regathers else ""
    parameters = f"{count} parameter{'s' if count > 1 else ''}"
    return f"bucket {bucket.number} of {parameters}: {', '.join(steps)}{regathers}"

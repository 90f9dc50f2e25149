"""Gathered parameters that are not kept for the backward pass, but gathered again in it.

What autograd would keep of a gathered parameter, it or a view of it, is kept as a reference: which
member of which bucket, and the view's geometry. The first reference that the backward pass
resolves gathers the bucket again, and starts the gather of the one before it; after the last one
the bucket is freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.torch_internals.tensors import storage_id, version


@dataclass(frozen=True)
class GatheredView:
    """A view of a gathered parameter."""

    packed: PackedBucket
    member: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class PackedBucket:
    """A bucket of which the backward pass of one run needs something.

    Args:
        versions: of the shards, as they were gathered.
        references: how many there are; `left` of them are not resolved yet.
        done: whether this backward pass has resolved all.
    """

    bound: BoundBucket
    shards: tuple[Tensor, ...]
    versions: tuple[int, ...]
    references: int = 0
    left: int = 0
    done: bool = False
    pending: Tensor | None = None
    tensors: list[Tensor] | None = None

    def start(self) -> None:
        """Starts the gather, unless it was."""
        if self.tensors is None and self.pending is None:
            self.pending = self.bound.gather(self.shards)

    def free(self) -> None:
        self.pending, self.tensors, self.left, self.done = None, None, self.references, True


@dataclass(eq=False)
class RegatherRun:
    """One run of a program: its saved tensors go through `pack` and `unpack`."""

    order: list[PackedBucket] = field(default_factory=list)
    _owners: dict[int, tuple[PackedBucket, int, StorageWeakRef]] = field(default_factory=dict)

    def add(
        self, bound: BoundBucket, shards: tuple[Tensor, ...], tensors: Sequence[Tensor]
    ) -> None:
        """Takes note of a bucket that was gathered."""
        packed = PackedBucket(bound, shards, tuple(map(version, shards)))
        for member, tensor in enumerate(tensors):
            # While there is a weak reference, no other storage gets the same identity.
            weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._owners[weak.cdata] = (packed, member, weak)

    def pack(self, tensor: Tensor) -> Tensor | GatheredView:
        owner = self._owners.get(storage_id(tensor))
        if owner is None:
            return tensor
        packed, member, _ = owner
        packed.references += 1
        packed.left += 1
        # In the order of last use: the backward pass goes through it from the end.
        if packed in self.order:
            self.order.remove(packed)
        self.order.append(packed)
        geometry = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return GatheredView(packed, member, *geometry)

    def unpack(self, saved: Tensor | GatheredView) -> Tensor:
        """Raises:
        RuntimeError: as autograd does, if the parameter was changed in place since.
        """
        if isinstance(saved, Tensor):
            return saved
        packed = saved.packed
        if version(packed.shards[saved.member]) != packed.versions[saved.member]:
            name = packed.bound.bucket.members[saved.member].value.name
            raise RuntimeError(
                f"parameter {name!r}, needed for gradient computation, has been modified by an "
                "inplace operation (such as `optimizer.step()`) since the forward pass"
            )
        with torch.no_grad():
            if packed.tensors is None:
                self._gather(packed)
            assert packed.tensors is not None
            member = packed.tensors[saved.member]
            view = member.as_strided(saved.size, saved.stride, saved.offset)
        packed.left -= 1
        if not packed.left:
            packed.free()
        return view

    def _gather(self, packed: PackedBucket) -> None:
        if packed.done:
            # The backward pass runs once more.
            for other in self.order:
                other.done = False
        packed.start()
        place = self.order.index(packed)
        if place and not self.order[place - 1].done:
            self.order[place - 1].start()
        assert packed.pending is not None
        packed.tensors, packed.pending = packed.bound.gathered(packed.pending), None


class BackwardRegather:
    """Where a program tells what it gathered; in compiled programs, and within operators that are
    computed again, nobody listens."""

    def __init__(self) -> None:
        self._run: RegatherRun | None = None

    @contextmanager
    def run(self) -> Iterator[RegatherRun]:
        """What is saved for the backward pass meanwhile goes through the hooks of one run."""
        run = RegatherRun()
        self._run = run
        try:
            with torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack):
                yield run
        finally:
            self._run = None

    def gathered(
        self, bound: BoundBucket, shards: tuple[Tensor, ...], tensors: Sequence[Tensor]
    ) -> None:
        if not torch.compiler.is_compiling() and self._run is not None:
            self._run.add(bound, shards, tensors)

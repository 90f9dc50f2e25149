"""Reshard after forward: free gathered parameters and gather them again in the backward pass.

Saved-tensor hooks replace each gathered parameter that autograd saves, or a view of it, by a
reference: its bucket, its index in the bucket, and the size, stride and offset of the view. The
first reference to a bucket that the backward pass unpacks gathers the bucket, and prefetches the
bucket used before it in the forward pass. After the last reference the bucket is freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.torch_internals.compiled import is_compiling
from shardwright.core.torch_internals.tensors import storage_id, version


@dataclass(frozen=True)
class GatheredView:
    """A reference to a gathered parameter, or to a view of it, in place of the saved tensor.

    Args:
        packed: the bucket of the parameter.
        member: index of the parameter in the bucket.
        dtype: dtype of the view, which differs from the parameter's for `view_as_complex`.
        size, stride, offset: geometry of the view, in elements of `dtype` of the storage.
        is_conj, is_neg: whether the view is the lazy conjugate or negative of that memory.
    """

    packed: PackedBucket
    member: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def of(self, member: Tensor) -> Tensor:
        """Return the view of `member`, the gathered parameter."""
        if member.dtype != self.dtype:
            # The bytes of all full elements of `dtype`; `Tensor.view` refuses the rest.
            size = self.dtype.itemsize
            used = member.numel() * member.itemsize // size * size // member.itemsize
            member = member.as_strided((used,), (1,), 0).view(self.dtype)
        view = member.as_strided(self.size, self.stride, self.offset)
        view = view.conj() if self.is_conj else view
        return view.neg() if self.is_neg else view


@dataclass(eq=False)
class PackedBucket:
    """A gathered bucket that the backward pass reads.

    Args:
        bound: the bucket, bound to process groups.
        shards: local shards of the members.
        versions: version counters of the shards when they were gathered.
        references: number of saved tensors that refer to the bucket.
        unresolved: number of references that the backward pass has not unpacked.
        is_resolved: whether the backward pass has unpacked all references.
        pending: pending result of a gather that was started; None otherwise.
        tensors: the gathered members; None while the bucket is freed.
    """

    bound: BoundBucket
    shards: tuple[Tensor, ...]
    versions: tuple[int, ...]
    references: int = 0
    unresolved: int = 0
    is_resolved: bool = False
    pending: Tensor | None = None
    tensors: list[Tensor] | None = None

    def start(self) -> None:
        """Start to gather the bucket, unless it is gathered or its gather was started."""
        if self.tensors is None and self.pending is None:
            self.pending = self.bound.start_gather(self.shards)

    def free(self) -> None:
        self.pending, self.tensors = None, None
        # With `retain_graph=True`, the next backward pass unpacks all references again.
        self.unresolved, self.is_resolved = self.references, True


@dataclass(eq=False)
class RegatherRun:
    """Saved-tensor hooks for one run of a program, which replace gathered parameters by references.

    Args:
        order: the buckets with references, in the order of their last use in the forward pass.
    """

    order: list[PackedBucket] = field(default_factory=list)
    _owners: dict[int, tuple[PackedBucket, int, StorageWeakRef]] = field(default_factory=dict)

    def add(
        self, bound: BoundBucket, shards: tuple[Tensor, ...], tensors: Sequence[Tensor]
    ) -> None:
        """Register the gathered parameters of a bucket.

        Autograd then saves references to them, from which the backward pass gathers them again.

        Args:
            bound: the bucket.
            shards: local shards of its parameters.
            tensors: its gathered parameters.
        """
        packed = PackedBucket(bound, shards, tuple(map(version, shards)))
        for member, tensor in enumerate(tensors):
            # While a weak reference exists, the address of the storage is not reused.
            weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._owners[weak.cdata] = (packed, member, weak)

    def pack(self, tensor: Tensor) -> Tensor | GatheredView:
        # By storage, as autograd also saves views, such as the transposed weight of a linear layer.
        owner = self._owners.get(storage_id(tensor))
        if owner is None:
            return tensor
        packed, member, _ = owner
        packed.references += 1
        packed.unresolved += 1
        # Ordered by last use, as the backward pass reads buckets in reverse.
        if packed in self.order:
            self.order.remove(packed)
        self.order.append(packed)
        geometry = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        lazy = tensor.is_conj(), tensor.is_neg()
        return GatheredView(packed, member, tensor.dtype, *geometry, *lazy)

    def unpack(self, saved: Tensor | GatheredView) -> Tensor:
        """Return the tensor that `pack` replaced by `saved`; gather the bucket of the tensor if it
        was freed.

        Raises:
            RuntimeError: if the parameter was modified in place since the forward pass.
        """
        if isinstance(saved, Tensor):
            return saved
        packed = saved.packed
        # Autograd checks versions of saved tensors only, not of tensors behind a reference.
        if version(packed.shards[saved.member]) != packed.versions[saved.member]:
            name = packed.bound.bucket.members[saved.member].value.name
            raise RuntimeError(
                f"parameter {name!r}, needed for gradient computation, has been modified by an "
                "inplace operation (such as `optimizer.step()`) since the forward pass\n"
                "call `backward()` before modifying parameters"
            )
        # Also in a backward pass with `create_graph=True`, which would record the gather.
        with torch.no_grad():
            if packed.tensors is None:
                self._gather_members_of_bucket(packed)
            assert packed.tensors is not None
            # Every gather gives a member the same memory layout, so the geometry of the saved view
            # applies.
            view = saved.of(packed.tensors[saved.member])
        packed.unresolved -= 1
        if not packed.unresolved:
            packed.free()
        return view

    def _gather_members_of_bucket(self, packed: PackedBucket) -> None:
        if packed.is_resolved:
            # This is another backward pass through the same graph (`retain_graph=True`).
            for bucket in self.order:
                bucket.is_resolved = False
        packed.start()
        # Prefetch the bucket that the backward pass reads next, unless it has read all of it
        # already.
        index = self.order.index(packed)
        if index and not self.order[index - 1].is_resolved:
            self.order[index - 1].start()
        assert packed.pending is not None
        packed.tensors, packed.pending = packed.bound.finish_gather(packed.pending), None


class BackwardRegather:
    """Recorder of the buckets that a forward pass gathers, which the backward pass gathers again.

    Not used in compiled programs and recomputed segments, whose recomputation repeats the gathers.
    """

    def __init__(self) -> None:
        self._run: RegatherRun | None = None

    @contextmanager
    def run(self) -> Iterator[RegatherRun]:
        """Context of one run of the program, with the saved-tensor hooks of a `RegatherRun`."""
        run = RegatherRun()
        self._run = run
        try:
            # Only the innermost hooks apply: hooks of the user around the call do not run.
            with torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack):
                yield run
        finally:
            self._run = None

    def record(
        self, bound: BoundBucket, shards: tuple[Tensor, ...], tensors: Sequence[Tensor]
    ) -> None:
        if not is_compiling() and self._run is not None:
            self._run.add(bound, shards, tensors)

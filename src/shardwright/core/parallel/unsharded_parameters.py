"""Unsharded parameters, in the layout of their use, through the micro-batches of one step.

unsharded = UnshardedParameters(program)                lowered with unsharded=True
unsharded.begin_step(shards)
for piece in pieces:                                    several may be in flight
    outputs, updates = program(unsharded.tensors(), buffers, piece, seed)
    backward(outputs)
gradients = unsharded.end_step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwright.core.lower.emit_buckets import cast_name, held_name, used_name
from shardwright.core.lower.program import Program
from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.torch_internals.tensors import prioritize_gradient


class UnshardedParameters:
    """The `parameters` of a program that was lowered with `unsharded=True`.

    All tensors are local. How a bucket of parameters is kept depends on the plan's level:

    - without one, and at `level1`: gathered (and cast) once per step; `tensors()` gives leaves
      whose unsharded gradients accumulate in the dtype of storage; `end_step()` reduces them, once
      per step.
    - at `level2`: gathered once per step; `tensors()` gives the same tensors for each micro-batch,
      whose backward pass reduces gradients as soon as a bucket is complete.
    - at `level3`: the program gathers itself; `tensors()` returns the stored shards as leaves.

    Buckets that are not gathered are reduced once a step at every level. Parameters that need no
    bucket are cast once a step at every level, if at all; through the cast, each micro-batch adds
    its gradient to the stored shard's. Of a program that was lowered without `unsharded`, it hands
    out the stored shards, as at `level3`.
    """

    def __init__(self, program: Program) -> None:
        self._values = program.parameters
        buckets = program.buckets if program.unsharded else ()
        self._once = [bound for bound in buckets if bound.bucket.reduces_once]
        self._held = [
            b for b in buckets if not b.bucket.reduces_once and b.bucket.level == "level2"
        ]
        self._to_cast = program.casts
        self._leaves: dict[str, Tensor] = {}
        self._casts: dict[str, Tensor] = {}
        self._used: dict[int, list[Tensor]] = {}
        self._pending: dict[int, Tensor] = {}
        self._sums: dict[int, list[Tensor]] = {}

    def begin_step(self, shards: Mapping[str, Tensor]) -> None:
        """Begin a step and start the gathers, which `tensors` waits for.

        Args:
            shards: this rank's stored shard of each parameter, by name.
        """
        self._leaves = {
            value.name: shards[value.name].detach().requires_grad_(value.requires_grad)
            for value in self._values
        }
        self._casts, self._used, self._sums, self._pending = {}, {}, {}, {}
        with torch.no_grad():
            for bound in (*self._once, *self._held):
                if bound.bucket.gathers:
                    self._pending[bound.bucket.number] = bound.start_gather(self._shards(bound))

    def tensors(self) -> dict[str, Any]:
        """The program's `parameters` for one micro-batch; call it once before each forward."""
        if not self._casts:
            # The cast saves no tensor, so the backward passes of all micro-batches may share it.
            casts = ((v, self._leaves[v.name].to(v.dtype)) for v in self._to_cast)
            self._casts = {cast_name(v): prioritize_gradient(cast) for v, cast in casts}
        by_name: dict[str, Any] = {**self._leaves, **self._casts}
        for bound in self._once:
            tensors: Sequence[Tensor] = self._as_used(bound)
            if bound.dtype != bound.stored_dtype:
                # One by one: a split backward pass must not find them joined in one node.
                sums = zip(tensors, self._sums_of(bound), strict=True)
                tensors = [
                    prioritize_gradient(_Summed.apply(tensor, total))  # type: ignore[no-untyped-call]
                    for tensor, total in sums
                ]
            for member, tensor in zip(bound.bucket.members, tensors, strict=True):
                by_name[used_name(member)] = tensor
        for bound in self._held:
            by_name[held_name(bound.bucket)] = self._as_used(bound)
        return by_name

    def leaves(self) -> list[Tensor]:
        """The tensors in which gradients accumulate, of those that `tensors` has returned."""
        tensors = [
            *self._leaves.values(),
            *chain(*self._used.values()),
            *chain(*self._sums.values()),
        ]
        return [tensor for tensor in tensors if tensor.requires_grad]

    def end_step(self) -> dict[str, Tensor]:
        """End the step after the last backward pass: reduce the remaining gradients, free gathered
        parameters, and return the gradients of stored shards by name, in their dtype.

        Parameters without a gradient are absent.
        """
        gradients = {name: leaf.grad for name, leaf in self._leaves.items()}
        with torch.no_grad():
            flat = [(bound, self._reduced(bound)) for bound in self._once]
            started = [(b, b.sum_replicas(sent)) for b, sent in flat if sent is not None]
            for bound, sent in started:
                shards = bound.shard_gradients(sent)
                for member, gradient in zip(bound.bucket.members, shards, strict=True):
                    name, other = member.value.name, gradients[member.value.name]
                    gradients[name] = gradient if other is None else other + gradient
        self._leaves, self._casts = {}, {}
        self._used, self._sums, self._pending = {}, {}, {}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _shards(self, bound: BoundBucket) -> list[Tensor]:
        return [self._leaves[member.value.name].detach() for member in bound.bucket.members]

    def _as_used(self, bound: BoundBucket) -> list[Tensor]:
        """The gathered members of a bucket, as leaves if their gradients accumulate here; waits in
        the first call."""
        number = bound.bucket.number
        if number not in self._used:
            with torch.no_grad():
                if bound.bucket.gathers:
                    tensors = bound.finish_gather(self._pending.pop(number))
                else:
                    tensors = bound.unsharded(self._shards(bound))
            leaves = bound.bucket.reduces_once and bound.dtype == bound.stored_dtype
            self._used[number] = [
                tensor.detach().requires_grad_(leaves and member.value.requires_grad)
                for member, tensor in zip(bound.bucket.members, tensors, strict=True)
            ]
        return self._used[number]

    def _sums_of(self, bound: BoundBucket) -> list[Tensor]:
        """Leaves without data, whose gradients accumulate in the dtype of storage."""
        number = bound.bucket.number
        if number not in self._sums:
            self._sums[number] = [
                tensor.new_empty(1, dtype=bound.stored_dtype)
                .expand(tensor.shape)
                .requires_grad_(member.value.requires_grad)
                for member, tensor in zip(bound.bucket.members, self._used[number], strict=True)
            ]
        return self._sums[number]

    def _reduced(self, bound: BoundBucket) -> Tensor | None:
        """Start to reduce the accumulated gradients of a bucket; None without any."""
        number = bound.bucket.number
        leaves = self._sums.get(number) or self._used.get(number, [])
        gradients = [None if leaf.grad is None else leaf.grad.to(bound.dtype) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if all(gradient is None for gradient in gradients):
            return None
        return bound.reduce(gradients)


class _Summed(torch.autograd.Function):
    """Returns the first tensor; its gradient goes to the second, cast to the dtype of that."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Tensor) -> Tensor:
        ctx.dtype = total.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0].to(ctx.dtype)

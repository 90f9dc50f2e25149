"""Unsharded parameters, in the layout in which operators read them, for one step's micro-batches.

unsharded = UnshardedParameters(program)                # lowered with unsharded=True
unsharded.begin_step(shards)
for leaves in micro_batches:                            # several may be in flight
    outputs, updates = program(unsharded.tensors(), buffers, leaves, seed)
    backward(outputs)
gradients = unsharded.end_step()

The levels are the stages of ZeRO (Rajbhandari et al., 2020), and differ in memory and communication
per micro-batch: with `level1` full parameters and full gradients stay in memory, with `level2` full
parameters only, with `level3` neither, at the cost of all-gathers in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwright.core.lower.emit_buckets import cast_key, gathered_bucket_key, used_member_key
from shardwright.core.lower.program import Program
from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.torch_internals.tensors import prioritize_gradient


class UnshardedParameters:
    """Provider of the `parameters` of a program that was lowered with `unsharded=True`.

    All tensors are local. The handling of a bucket depends on the plan's ZeRO level:

    - without ZeRO and with `level1`: gathered and cast once per step. `tensors()` returns leaves,
      in which unsharded gradients accumulate in the stored dtype; `end_step()` reduces the
      gradients once per step.
    - `level2`: gathered once per step. `tensors()` returns the gathered tensors; each backward pass
      reduces the gradients of a bucket as soon as they are complete.
    - `level3`: the program gathers. `tensors()` returns the local shards as leaves.

    Buckets that need no gather are reduced once per step at every level. Parameters without a
    bucket are cast at most once per step, and all micro-batches share the cast. For a program
    lowered without `unsharded`, `tensors()` returns local shards.

    Args:
        program: the program, with the buckets that are gathered and reduced.
    """

    def __init__(self, program: Program) -> None:
        self._parameter_values = program.parameters
        buckets = program.buckets if program.unsharded else ()
        # Buckets of level 3 are in neither list: the program gathers and reduces them.
        self._reduced_once = [bound for bound in buckets if bound.bucket.reduces_once]
        self._gathered_once = [
            b for b in buckets if not b.bucket.reduces_once and b.bucket.level == "level2"
        ]
        self._values_to_cast = program.casts
        self._leaves: dict[str, Tensor] = {}
        self._casts: dict[str, Tensor] = {}
        self._gathered: dict[int, list[Tensor]] = {}
        self._pending_gathers: dict[int, Tensor] = {}
        self._accumulators: dict[int, list[Tensor]] = {}

    def begin_step(self, shards: Mapping[str, Tensor]) -> None:
        """Begin a step: start the gathers whose results `tensors()` returns.

        Args:
            shards: this rank's local shards by name.
        """
        # Detached leaves: gradients of micro-batches accumulate in their `grad`, and not in that of
        # the parameters.
        self._leaves = {
            value.name: shards[value.name].detach().requires_grad_(value.requires_grad)
            for value in self._parameter_values
        }
        self._casts, self._gathered, self._accumulators, self._pending_gathers = {}, {}, {}, {}
        # All gathers start here, and overlap with the computation before the first use of their
        # bucket.
        with torch.no_grad():
            for bound in (*self._reduced_once, *self._gathered_once):
                if bound.bucket.gathers:
                    self._pending_gathers[bound.bucket.number] = bound.start_gather(
                        self._detach_local_shards(bound)
                    )

    def tensors(self) -> dict[str, Any]:
        """Return the program's `parameters`; to be called before the forward pass of each
        micro-batch."""
        if not self._casts:
            # A cast saves no tensor for backward, so all micro-batches may share its autograd node
            # without `retain_graph`.
            # Casts depend on the leaves of this step, so they are made at its first micro-batch.
            casts = ((v, self._leaves[v.name].to(v.dtype)) for v in self._values_to_cast)
            self._casts = {cast_key(v): prioritize_gradient(cast) for v, cast in casts}
        by_name: dict[str, Any] = {**self._leaves, **self._casts}
        for bound in self._reduced_once:
            tensors: Sequence[Tensor] = self._gather_unsharded_members(bound)
            if bound.dtype != bound.stored_dtype:
                # One autograd node per parameter: a split backward pass runs the node of one
                # parameter by itself.
                accumulators = zip(tensors, self._make_gradient_accumulators(bound), strict=True)
                tensors = [
                    prioritize_gradient(_AccumulateInStoredDtype.apply(tensor, accumulator))  # type: ignore[no-untyped-call]
                    for tensor, accumulator in accumulators
                ]
            for member, tensor in zip(bound.bucket.members, tensors, strict=True):
                by_name[used_member_key(member)] = tensor
        for bound in self._gathered_once:
            by_name[gathered_bucket_key(bound.bucket)] = self._gather_unsharded_members(bound)
        return by_name

    def leaves(self) -> list[Tensor]:
        """Return the leaves of this step in which gradients accumulate."""
        tensors = [
            *self._leaves.values(),
            *chain(*self._gathered.values()),
            *chain(*self._accumulators.values()),
        ]
        return [tensor for tensor in tensors if tensor.requires_grad]

    def end_step(self) -> dict[str, Tensor]:
        """End the step after the last backward pass, and free the gathered parameters.

        Returns:
            Gradients of local shards by name, in the stored dtype; parameters without a gradient
            are left out.
        """
        # Gradients that a backward pass has reduced already, or that need no reduction.
        gradients = {name: leaf.grad for name, leaf in self._leaves.items()}
        with torch.no_grad():
            # Start all reductions before waiting for the first, so that they overlap.
            reductions = [
                (bound, self._start_gradient_reduction(bound)) for bound in self._reduced_once
            ]
            started = [
                (b, b.sum_replicas(pending)) for b, pending in reductions if pending is not None
            ]
            for bound, pending in started:
                shards = bound.shard_gradients(pending)
                for member, gradient in zip(bound.bucket.members, shards, strict=True):
                    # A parameter that is also read in another layout has a second gradient.
                    name, previous = member.value.name, gradients[member.value.name]
                    gradients[name] = gradient if previous is None else previous + gradient
        self._leaves, self._casts = {}, {}
        self._gathered, self._accumulators, self._pending_gathers = {}, {}, {}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _detach_local_shards(self, bound: BoundBucket) -> list[Tensor]:
        return [self._leaves[member.value.name].detach() for member in bound.bucket.members]

    def _gather_unsharded_members(self, bound: BoundBucket) -> list[Tensor]:
        """Return the gathered parameters of a bucket; the first call in a step waits for the
        gather.

        They are autograd leaves if their gradients accumulate over micro-batches.
        """
        number = bound.bucket.number
        if number not in self._gathered:
            with torch.no_grad():
                if bound.bucket.gathers:
                    tensors = bound.finish_gather(self._pending_gathers.pop(number))
                else:
                    tensors = bound.unsharded(self._detach_local_shards(bound))
            # Gradients accumulate in `grad`, which has the dtype of its leaf: with another stored
            # dtype the accumulators are the leaves.
            leaves = bound.bucket.reduces_once and bound.dtype == bound.stored_dtype
            self._gathered[number] = [
                # Other gathered tensors are no leaves: the program passes their gradients to its
                # own reduction.
                tensor.detach().requires_grad_(leaves and member.value.requires_grad)
                for member, tensor in zip(bound.bucket.members, tensors, strict=True)
            ]
        return self._gathered[number]

    def _make_gradient_accumulators(self, bound: BoundBucket) -> list[Tensor]:
        """Return leaf tensors for a bucket's gradients, which accumulate in the stored dtype.

        Accumulation in bfloat16 loses small gradients, and autograd requires that a leaf and its
        `grad` have equal dtypes. So the leaves have the stored dtype; to take no memory they expand
        a single element.
        """
        number = bound.bucket.number
        if number not in self._accumulators:
            self._accumulators[number] = [
                tensor.new_empty(1, dtype=bound.stored_dtype)
                .expand(tensor.shape)
                .requires_grad_(member.value.requires_grad)
                for member, tensor in zip(bound.bucket.members, self._gathered[number], strict=True)
            ]
        return self._accumulators[number]

    def _start_gradient_reduction(self, bound: BoundBucket) -> Tensor | None:
        """Start the reduction of a bucket's accumulated gradients; None if it has no gradient."""
        number = bound.bucket.number
        # The accumulators, where the stored dtype differs from that of the computation.
        leaves = self._accumulators.get(number) or self._gathered.get(number, [])
        # Reduced in the dtype of the bucket, not in that of the accumulation.
        gradients = [None if leaf.grad is None else leaf.grad.to(bound.dtype) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if all(gradient is None for gradient in gradients):
            return None
        return bound.reduce(gradients)


class _AccumulateInStoredDtype(torch.autograd.Function):
    """Autograd function that adds the gradient of `tensor`, cast to the stored dtype, to
    `accumulator.grad`.

    The forward pass returns `tensor`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, accumulator: Tensor) -> Tensor:
        ctx.dtype = accumulator.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0].to(ctx.dtype)

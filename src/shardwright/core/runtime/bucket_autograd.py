"""A bucket's way through a program, as autograd functions.

| line | forward | backward |
|---|---|---|
| `enter` | nothing | waits, hands out the gradients of the stored shards |
| `start` | starts the gather | waits for the reduce-scatter, starts the sum over the replicas |
| `finish` | waits for the gather | starts to reduce as soon as all its gradients are complete |

Autograd runs late what was made early. So `start`, which stands one bucket ahead of its use, waits
one bucket after it: communication goes on while others compute, forward and backward. Where it
starts a sum over replicas, `enter` is one of the first lines of a program, and waits last; else it
stands beside `start`, so that gradients are added up before the next ones come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.runtime.regather import BackwardRegather


class EnteredBucket(NamedTuple):
    """A bucket in a program: what its gradient flows through, the stored shards, and the members to
    which the backward pass that is under way gives no gradient."""

    token: Tensor
    shards: tuple[Tensor, ...]
    without_gradient: set[int]


class StartedGather(NamedTuple):
    """A bucket whose gather is under way."""

    token: Tensor
    shards: tuple[Tensor, ...]
    without_gradient: set[int]
    pending: Tensor


@dataclass(frozen=True)
class EnterBucket:
    """Stored shards of a bucket come in."""

    bound: BoundBucket

    def __call__(self, *shards: Tensor) -> EnteredBucket:
        without_gradient: set[int] = set()
        token = _Enter.apply(self.bound, without_gradient, *shards)  # type: ignore[no-untyped-call]
        return EnteredBucket(token, tuple(shard.detach() for shard in shards), without_gradient)


@dataclass(frozen=True)
class StartGather:
    """Starts a bucket's gather."""

    bound: BoundBucket

    def __call__(self, entered: EnteredBucket) -> StartedGather:
        token = _Start.apply(self.bound, entered.token)  # type: ignore[no-untyped-call]
        pending = self.bound.gather(entered.shards)
        return StartedGather(token, entered.shards, entered.without_gradient, pending)


@dataclass(frozen=True)
class ReuseGathered:
    """Stands for `StartGather` where a bucket was gathered before: nothing is sent."""

    bound: BoundBucket

    def __call__(self, entered: EnteredBucket, held: Sequence[Tensor]) -> EnteredBucket:
        token = _Start.apply(self.bound, entered.token)  # type: ignore[no-untyped-call]
        return EnteredBucket(token, tuple(held), entered.without_gradient)


@dataclass(frozen=True)
class FinishGather:
    """A bucket's members as they are used.

    Args:
        again: where members are gathered again in the backward pass.
    """

    bound: BoundBucket
    again: BackwardRegather | None = None

    def __call__(self, started: StartedGather) -> tuple[Tensor, ...]:
        tensors = self.bound.gathered(started.pending)
        if self.again is not None:
            self.again.gathered(self.bound, started.shards, tensors)
        return _finish(self.bound, started, tensors)


@dataclass(frozen=True)
class UseAsStored:
    """Members of a bucket that need not be gathered, or are held, as they are used."""

    bound: BoundBucket
    held: bool = False

    def __call__(self, entered: EnteredBucket) -> tuple[Tensor, ...]:
        tensors = entered.shards if self.held else self.bound.unsharded(entered.shards)
        return _finish(self.bound, entered, tensors)


def _finish(
    bound: BoundBucket, bucket: EnteredBucket | StartedGather, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    return _Finish.apply(bound, bucket.without_gradient, bucket.token, *tensors)  # type: ignore[no-any-return,no-untyped-call]


class _Enter(torch.autograd.Function):
    """From stored shards to the bucket's token: a tensor without numbers, of the size of all shards
    together, through which their gradient flows."""

    @staticmethod
    def forward(
        ctx: Any, bound: BoundBucket, without_gradient: set[int], *shards: Tensor
    ) -> Tensor:
        ctx.bound, ctx.without_gradient = bound, without_gradient
        return shards[0].new_empty(1, dtype=bound.dtype).expand(bound.numel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shards = enumerate(ctx.bound.shard_gradients(gradients[0]))
        return None, None, *(None if n in ctx.without_gradient else shard for n, shard in shards)


class _Start(torch.autograd.Function):
    """What happens to a bucket's gradient between its reduce-scatter and its end."""

    @staticmethod
    def forward(ctx: Any, bound: BoundBucket, token: Tensor) -> Tensor:
        ctx.bound = bound
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.bound.sum_replicas(gradients[0])


class _Finish(torch.autograd.Function):
    """From members' gradients to the bucket's.

    A backward pass may start from some outputs and reach some members only. The others have no
    gradient then, rather than zeros, on which an optimizer would act.
    """

    @staticmethod
    def forward(
        ctx: Any, bound: BoundBucket, without_gradient: set[int], token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bound, ctx.without_gradient = bound, without_gradient
        ctx.first = tensors[0].shape, tensors[0].dtype, tensors[0].device
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling():
            ctx.without_gradient.clear()
            ctx.without_gradient.update(n for n, g in enumerate(gradients) if g is None)
        if all(gradient is None for gradient in gradients):
            # An operator may leave out the gradients of all; its devices still communicate.
            shape, dtype, device = ctx.first
            gradients = (torch.zeros(shape, dtype=dtype, device=device), *gradients[1:])
        return None, None, ctx.bound.reduce(gradients), *(None for _ in gradients)

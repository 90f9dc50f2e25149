"""A bucket's way through a program, as autograd functions.

| line | forward | backward |
|---|---|---|
| `enter` | nothing | waits, hands out the gradients of the stored shards |
| `start` | starts the gather | waits for the reduce-scatter, starts the sum over the replicas |
| `finish` | waits for the gather | starts to reduce as soon as all its gradients are complete |

Autograd runs late what was made early. So `enter`, the first line of a program, waits last, and
`start`, which stands one bucket ahead of its use, waits one bucket after it: communication goes on
while others compute, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.runtime.buckets import BoundBucket
from shardwright.runtime.regather import BackwardRegather


class EnteredBucket(NamedTuple):
    """A bucket in a program: what its gradient flows through, and the stored shards."""

    token: Tensor
    shards: tuple[Tensor, ...]


class StartedGather(NamedTuple):
    """A bucket whose gather is under way."""

    token: Tensor
    shards: tuple[Tensor, ...]
    pending: Tensor


@dataclass(frozen=True)
class EnterBucket:
    """Stored shards of a bucket come in."""

    bound: BoundBucket

    def __call__(self, *shards: Tensor) -> EnteredBucket:
        token = _Enter.apply(self.bound, *shards)  # type: ignore[no-untyped-call]
        return EnteredBucket(token, tuple(shard.detach() for shard in shards))


@dataclass(frozen=True)
class StartGather:
    """Starts a bucket's gather."""

    bound: BoundBucket

    def __call__(self, entered: EnteredBucket) -> StartedGather:
        token = _Start.apply(self.bound, entered.token)  # type: ignore[no-untyped-call]
        return StartedGather(token, entered.shards, self.bound.gather(entered.shards))


@dataclass(frozen=True)
class ReuseGathered:
    """Stands for `StartGather` where a bucket was gathered before: nothing is sent."""

    bound: BoundBucket

    def __call__(self, entered: EnteredBucket, held: Sequence[Tensor]) -> EnteredBucket:
        token = _Start.apply(self.bound, entered.token)  # type: ignore[no-untyped-call]
        return EnteredBucket(token, tuple(held))


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
        return _finish(self.bound, started.token, tensors)


@dataclass(frozen=True)
class UseAsStored:
    """Members of a bucket that need not be gathered, or are held, as they are used."""

    bound: BoundBucket
    held: bool = False

    def __call__(self, entered: EnteredBucket) -> tuple[Tensor, ...]:
        tensors = entered.shards if self.held else self.bound.unsharded(entered.shards)
        return _finish(self.bound, entered.token, tensors)


def _finish(bound: BoundBucket, token: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _Finish.apply(bound, token, *tensors)  # type: ignore[no-any-return,no-untyped-call]


class _Enter(torch.autograd.Function):
    """From stored shards to the bucket's token: a tensor without numbers, of the size of all shards
    together, through which their gradient flows."""

    @staticmethod
    def forward(ctx: Any, bound: BoundBucket, *shards: Tensor) -> Tensor:
        ctx.bound = bound
        return shards[0].new_empty(1, dtype=bound.dtype).expand(bound.numel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.bound.shard_gradients(gradients[0])


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
    """From members' gradients to the bucket's."""

    @staticmethod
    def forward(
        ctx: Any, bound: BoundBucket, token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bound = bound
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, ctx.bound.reduce(gradients), *(None for _ in gradients)

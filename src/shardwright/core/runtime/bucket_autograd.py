"""Autograd functions that gather a bucket of parameters and reduce its gradients.

| program line | forward | backward |
|---|---|---|
| `enter` | nothing | waits, returns the gradients of the local shards |
| `start` | starts the gather | waits for the reduce-scatter, starts the sum over the replicas |
| `finish` | waits for the gather | starts the reduction of the bucket's gradients |

Autograd runs nodes in reverse order of their creation. A program calls `start` one bucket ahead of
the bucket's use, so the backward pass waits one bucket later: communication overlaps computation
in both directions. If `start` starts a sum over replicas in the backward pass, `enter` is one of
the first lines of the program and so waits last. Otherwise the program calls `enter` beside
`start`, so that the gradients of a bucket are accumulated before those of the next bucket arrive.

All parameters of a `sw.local_map` function are gathered before the function runs. By default,
autograd would reduce their gradients only after the backward pass of the whole function. Instead,
`finish` reduces the gradients of each bucket as soon as they are complete, and `start` waits for
the reduction once that of the next bucket runs, so that two buckets of gradients are in flight. The
function may branch differently on each rank, but all ranks must issue collectives in one order. So
each of these calls also takes a result of the call before, its *turn*, which makes autograd run
them in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.runtime.regather import BackwardRegather
from shardwright.core.torch_internals.compiled import is_compiling
from shardwright.core.torch_internals.tensors import prioritize_gradient


class EnteredBucket(NamedTuple):
    """A bucket whose local shards are inputs of the program.

    Args:
        token: tensor through which the bucket's flat gradient flows.
        shards: local shards of the members, detached.
        without_gradient: indices of members that get no gradient in the current backward pass.
    """

    token: Tensor
    shards: tuple[Tensor, ...]
    without_gradient: set[int]


class StartedGather(NamedTuple):
    """A bucket whose all-gather has been started; `pending` is its flat result, which has not been
    waited for."""

    token: Tensor
    shards: tuple[Tensor, ...]
    without_gradient: set[int]
    pending: Tensor


@dataclass(frozen=True)
class EnterBucket:
    """Callable that passes the local shards of a bucket's parameters into the program."""

    bound: BoundBucket

    def __call__(self, *shards: Tensor) -> EnteredBucket:
        without_gradient: set[int] = set()
        # One token instead of one gradient per shard, so that a bucket's gradients stay one flat
        # tensor.
        token = _EnterBucketFunction.apply(self.bound, without_gradient, *shards)  # type: ignore[no-untyped-call]
        # Detached, as gradients reach the shards through the token only.
        return EnteredBucket(token, tuple(shard.detach() for shard in shards), without_gradient)


@dataclass(frozen=True)
class StartGather:
    """Callable that starts the all-gather of a bucket.

    With a `turn`, the last output of the previous call or an empty tensor, it returns the started
    gather and the next turn.
    """

    bound: BoundBucket

    def __call__(
        self, entered: EnteredBucket, turn: Tensor | None = None
    ) -> StartedGather | tuple[StartedGather, Tensor]:
        token, *turns = _connect_token(self.bound, entered.token, turn)
        # Outside autograd: the token carries the gradient, whose collectives are started by
        # `_FinishGatherFunction`.
        pending = self.bound.start_gather(entered.shards)
        started = StartedGather(token, entered.shards, entered.without_gradient, pending)
        return (started, turns[0]) if turns else started


@dataclass(frozen=True)
class ReuseGathered:
    """Callable that replaces `StartGather` if the gathered parameters of a bucket are cached."""

    bound: BoundBucket

    def __call__(
        self, entered: EnteredBucket, cached: Sequence[Tensor], turn: Tensor | None = None
    ) -> EnteredBucket | tuple[EnteredBucket, Tensor]:
        token, *turns = _connect_token(self.bound, entered.token, turn)
        # The cached members take the place of the shards, which `UseAsStored` returns unchanged.
        reused = EnteredBucket(token, tuple(cached), entered.without_gradient)
        return (reused, turns[0]) if turns else reused


def _connect_token(bound: BoundBucket, token: Tensor, turn: Tensor | None) -> tuple[Tensor, ...]:
    """Return a view of `token` whose backward pass waits for the reduction of its gradient, then
    the next turn if there is a `turn`."""
    results: tuple[Tensor, ...] = _StartGatherFunction.apply(bound, token, turn)  # type: ignore[no-untyped-call]
    if turn is not None:
        _prioritize_turn(results[-1])
    return results


@dataclass(frozen=True)
class FinishGather:
    """Callable that waits for the all-gather of a bucket, and returns its unsharded parameters.

    Argument `turn` is the last output of the previous bucket's call, an empty tensor, or None. This
    dependency makes autograd reduce the buckets in one order on all ranks.

    Args:
        bound: the bucket, bound to process groups.
        regather: frees the members and gathers them again in the backward pass (reshard after
            forward); None to keep them.
    """

    bound: BoundBucket
    regather: BackwardRegather | None = None

    def __call__(self, started: StartedGather, turn: Tensor | None = None) -> tuple[Tensor, ...]:
        tensors = self.bound.finish_gather(started.pending)
        if self.regather is not None:
            self.regather.record(self.bound, started.shards, tensors)
        return _connect_gradients_to_token(self.bound, started, tensors, turn)


@dataclass(frozen=True)
class UseAsStored:
    """Callable that returns the parameters of a bucket that needs no all-gather: they are not
    sharded, or were gathered before.

    Argument `turn` is the last output of the previous bucket's call, an empty tensor, or None. This
    dependency makes autograd reduce the buckets in one order on all ranks.
    """

    bound: BoundBucket
    is_cached: bool = False

    def __call__(self, entered: EnteredBucket, turn: Tensor | None = None) -> tuple[Tensor, ...]:
        tensors = entered.shards if self.is_cached else self.bound.unsharded(entered.shards)
        return _connect_gradients_to_token(self.bound, entered, tensors, turn)


def _connect_gradients_to_token(
    bound: BoundBucket,
    bucket: EnteredBucket | StartedGather,
    tensors: Sequence[Tensor],
    turn: Tensor | None,
) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _FinishGatherFunction.apply(  # type: ignore[no-untyped-call]
        bound, bucket.without_gradient, bucket.token, turn, *tensors
    )
    if turn is not None:
        _prioritize_turn(results[-1])
    return results


def _prioritize_turn(turn: Tensor) -> None:
    # A compiled backward pass has an order of its own.
    if not is_compiling():
        prioritize_gradient(turn)


class _EnterBucketFunction(torch.autograd.Function):
    """Create the token of a bucket: a tensor with the total size of its local shards, through which
    their gradients flow as one flat tensor."""

    @staticmethod
    def forward(
        ctx: Any, bound: BoundBucket, without_gradient: set[int], *shards: Tensor
    ) -> Tensor:
        ctx.bound, ctx.without_gradient = bound, without_gradient
        # Autograd checks that a gradient has the shape of its output, so the token has the shape of
        # the flat gradient; expanded, it takes the memory of one element.
        return shards[0].new_empty(1, dtype=bound.dtype).expand(bound.numel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shards = enumerate(ctx.bound.shard_gradients(gradients[0]))
        # `_FinishGatherFunction.backward` has filled the set earlier in this backward pass.
        return None, None, *(None if n in ctx.without_gradient else shard for n, shard in shards)


class _StartGatherFunction(torch.autograd.Function):
    """Return the `token` of a bucket unchanged, then the next turn if there is a `turn`; in the
    backward pass, wait for the reduce-scatter of the gradients and start their all-reduce over
    replicas."""

    @staticmethod
    def forward(
        ctx: Any, bound: BoundBucket, token: Tensor, turn: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.bound = bound
        # The turn only orders the nodes, and has no gradient.
        ctx.set_materialize_grads(False)
        # A view, since autograd treats an input that is returned unchanged as modified in place.
        return token.view_as(token), *([] if turn is None else [turn.new_empty(0)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None, None]:
        # No member of the bucket was reached.
        if gradients[0] is None:
            return None, None, None
        return None, ctx.bound.sum_replicas(gradients[0]), None


class _FinishGatherFunction(torch.autograd.Function):
    """Return the gathered members of a bucket; in the backward pass, start the reduction of their
    gradients as one flat tensor.

    `turn` is the last output of the previous bucket's call; the last output of this call is the
    next `turn`. This chain makes autograd reduce the buckets in a fixed order.

    Members that a backward pass does not reach get None as gradient, not zeros: momentum and weight
    decay would change parameters with zero gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bound: BoundBucket,
        without_gradient: set[int],
        token: Tensor,
        turn: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.bound, ctx.without_gradient, ctx.count = bound, without_gradient, len(tensors)
        ctx.first = tensors[0].shape, tensors[0].dtype, tensors[0].device
        # None tells a member that the backward pass does not reach from one with a zero gradient.
        ctx.set_materialize_grads(False)
        # Views, since autograd treats an input that is returned unchanged as modified in place.
        views = [tensor.view_as(tensor) for tensor in tensors]
        return (*views, *([] if turn is None else [turn.new_empty(0)]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # The turn only orders the nodes, and has no gradient.
        gradients = gradients[: ctx.count]
        # A compiled backward pass cannot change the set; there, members without gradient get zeros.
        if not is_compiling():
            ctx.without_gradient.clear()
            ctx.without_gradient.update(n for n, g in enumerate(gradients) if g is None)
        if all(gradient is None for gradient in gradients):
            # Even without gradients this rank must take part in the collective.
            shape, dtype, device = ctx.first
            gradients = (torch.zeros(shape, dtype=dtype, device=device), *gradients[1:])
        # None for the members: their gradients flow through the token.
        return None, None, ctx.bound.reduce(gradients), None, *(None for _ in gradients)

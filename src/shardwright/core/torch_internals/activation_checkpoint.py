"""Intercept calls of `torch.utils.checkpoint.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint


@contextmanager
def checkpointed_calls_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager in which `checkpoint(function, …, use_reentrant=False)` calls `function`
    without checkpointing.

    Args:
        context: makes the context manager of each call, which tags the call's operators so that
            the plan decides on recomputation.
    """

    def around_call(*args: Any, **kwargs: Any) -> Iterator[None]:
        with context():
            # PyTorch advances this generator once before it calls the function, and once after it.
            yield

    # `checkpoint` looks this function up in its module in each call.
    original = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = around_call
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original


class _NonReentrantCheckpoint:
    """Replacement of `CheckpointFunction` that makes reentrant checkpoints non-reentrant."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        # As in PyTorch: a reentrant checkpoint has gradients only if an argument requires one.
        has_gradient = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
            return checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )


@contextmanager
def recomputed_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager in which functions called by `checkpoint` run in `context()`, both in the
    forward pass and when recomputed.

    Reentrant checkpoints become non-reentrant, with equal results: the nested backward pass of a
    reentrant checkpoint would accumulate into parameters of the sharded program, and reduce their
    gradients one by one.

    Args:
        context: makes the context manager of each call.
    """
    original: Any = checkpoint._checkpoint_without_reentrant_generator
    reentrant = checkpoint.CheckpointFunction

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def recompute(*inputs: Any, **keywords: Any) -> Any:
            with context():
                return function(*inputs, **keywords)

        return original(recompute, *args, **kwargs)

    # `checkpoint` looks both names up in its module in each call.
    vars(checkpoint)["_checkpoint_without_reentrant_generator"] = generator
    vars(checkpoint)["CheckpointFunction"] = _NonReentrantCheckpoint
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original
        vars(checkpoint)["CheckpointFunction"] = reentrant

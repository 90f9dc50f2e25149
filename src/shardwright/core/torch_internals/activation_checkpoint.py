"""Interception of `torch.utils.checkpoint` while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils import checkpoint


@contextmanager
def checkpointed_calls_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which `checkpoint(function, …, use_reentrant=False)` only calls the function.

    Each call runs in a new `context()`, which tags its operators for recomputation by the plan.
    """

    def around_call(*args: Any, **kwargs: Any) -> Iterator[None]:
        with context():
            yield

    original = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = around_call
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original


@contextmanager
def recomputed_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Lets what is called in it under `checkpoint(function, …, use_reentrant=False)` be recomputed
    in a context of its own in the backward pass."""
    original: Any = checkpoint._checkpoint_without_reentrant_generator

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def recomputed(*inputs: Any, **keywords: Any) -> Any:
            with context():
                return function(*inputs, **keywords)

        return original(recomputed, *args, **kwargs)

    vars(checkpoint)["_checkpoint_without_reentrant_generator"] = generator
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original

"""The user's calls of `torch.utils.checkpoint` while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils import checkpoint


@contextmanager
def checkpointed_calls_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Lets `checkpoint(function, …, use_reentrant=False)` call its function in a context of its
    own, and do nothing else."""

    def around_call(*args: Any, **kwargs: Any) -> Iterator[None]:
        with context():
            yield

    original = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = around_call
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original

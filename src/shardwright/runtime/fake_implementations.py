"""Operators of users, whose results must have the shapes that their fake implementations say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.errors import CaptureError

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AsFaked:
    """An operator with the shapes of its results on this rank.

    Raises:
        CaptureError: if it returns others.
    """

    function: Callable[..., Any]
    shapes: Shapes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        shapes = tuple(tuple(part.shape) for part in parts if isinstance(part, Tensor))
        if shapes != self.shapes:
            raise CaptureError(
                f"the fake implementation of `{self.function}` says that it returns"
                f" {_text(self.shapes)}, but it returns {_text(shapes)}: give"
                " `torch.library.register_fake` the shapes that the operator returns"
            )
        return result


def _text(shapes: Shapes) -> str:
    return " and ".join(map(str, shapes))

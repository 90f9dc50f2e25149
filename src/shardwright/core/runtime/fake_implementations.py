"""Check that results of users' custom operators have the shapes and dtypes of their fake
implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CaptureError

FakeResults = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and dtype of each tensor."""


@dataclass(frozen=True)
class CheckedCustomOp:
    """A custom operator with the expected local shapes and dtypes of its results.

    Raises:
        CaptureError: if it returns others.
    """

    function: Callable[..., Any]
    said: FakeResults

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        returned = tuple((tuple(p.shape), p.dtype) for p in parts if isinstance(p, Tensor))
        if returned != self.said and not self._is_in_float64(returned):
            raise CaptureError(
                f"the fake implementation of `{self.function}` says that it returns"
                f" {_text(self.said, returned)}, but it returns {_text(returned, self.said)}: give"
                " `torch.library.register_fake` the shapes and dtypes that the operator returns"
            )
        return result

    def _is_in_float64(self, returned: FakeResults) -> bool:
        """Whether results differ only as an operator that computes in one dtype does where all
        others are computed in float64."""
        if [shape for shape, _ in returned] != [shape for shape, _ in self.said]:
            return False
        pairs = zip(returned, self.said, strict=True)
        return all(
            mine == said or (said is torch.float64 and mine.is_floating_point)
            for (_, mine), (_, said) in pairs
        )


def _text(results: FakeResults, others: FakeResults) -> str:
    """The shapes of `results` as text or, if they equal those of `others`, the dtypes."""
    shapes = [str(shape) for shape, _ in results]
    differ = shapes != [str(shape) for shape, _ in others]
    return " and ".join(shapes if differ else [str(dtype) for _, dtype in results])

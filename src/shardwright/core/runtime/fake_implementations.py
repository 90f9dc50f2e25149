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
    expected: FakeResults

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        # Wrong shapes would only show in a later operator, far from the operator that is wrong.
        parts = result if isinstance(result, (tuple, list)) else (result,)
        returned = tuple((tuple(p.shape), p.dtype) for p in parts if isinstance(p, Tensor))
        if returned != self.expected and not self._differs_by_float64(returned):
            raise CaptureError(
                f"the fake implementation of `{self.function}` returns"
                f" {_describe(self.expected, returned)}, but the operator returns"
                f" {_describe(returned, self.expected)}\n"
                "return the shapes and dtypes of the operator from the function registered with"
                " `torch.library.register_fake`"
            )
        return result

    def _differs_by_float64(self, returned: FakeResults) -> bool:
        """Whether the dtypes differ only where float64 is expected.

        A comparison in float64 converts all operators; one with a fixed dtype keeps its own.
        """
        if [shape for shape, _ in returned] != [shape for shape, _ in self.expected]:
            return False
        pairs = zip(returned, self.expected, strict=True)
        return all(
            dtype == expected or (expected is torch.float64 and dtype.is_floating_point)
            for (_, dtype), (_, expected) in pairs
        )


def _describe(results: FakeResults, others: FakeResults) -> str:
    """The shapes of `results` as text or, if they equal those of `others`, the dtypes."""
    shapes = [str(shape) for shape, _ in results]
    differ = shapes != [str(shape) for shape, _ in others]
    return " and ".join(shapes if differ else [str(dtype) for _, dtype in results])

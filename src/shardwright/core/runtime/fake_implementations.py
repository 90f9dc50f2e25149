"""Check that results of users' custom operators have the shapes and dtypes that the operators' fake
implementations return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CaptureError

FakeResults = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors that an operator returns."""


@dataclass(frozen=True)
class CheckedCustomOp:
    """A custom operator that checks its results when it is called.

    Args:
        function: the custom operator.
        expected: local shapes and dtypes of the results, from the fake implementation.

    Raises:
        CaptureError: at a call that returns other shapes or dtypes.
    """

    function: Callable[..., Any]
    expected: FakeResults

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        # Otherwise wrong shapes would raise an error in a later operator only, far from their
        # cause.
        results = result if isinstance(result, (tuple, list)) else (result,)
        # An operator may also return numbers, which have no shape.
        returned = tuple((tuple(p.shape), p.dtype) for p in results if isinstance(p, Tensor))
        if returned != self.expected and not self._differs_only_by_float64(returned):
            raise CaptureError(
                f"the fake implementation of `{self.function}` returns "
                f"{_describe_shapes_or_dtypes(self.expected, returned)}, but the operator returns "
                f"{_describe_shapes_or_dtypes(returned, self.expected)}\n"
                "correct the fake implementation (`torch.library.register_fake`), so that it "
                "returns the shapes and dtypes of the operator"
            )
        return result

    def _differs_only_by_float64(self, returned: FakeResults) -> bool:
        """Whether dtypes differ only where float64 is expected and another floating-point dtype is
        returned.

        `sw.check` converts the graph to float64, but an operator may return a fixed dtype.
        """
        if [shape for shape, _ in returned] != [shape for shape, _ in self.expected]:
            return False
        pairs = zip(returned, self.expected, strict=True)
        return all(
            dtype == expected or (expected is torch.float64 and dtype.is_floating_point)
            for (_, dtype), (_, expected) in pairs
        )


def _describe_shapes_or_dtypes(results: FakeResults, compared: FakeResults) -> str:
    """Return the shapes of `results` as text, or their dtypes if the shapes equal `compared`'s."""
    shapes = [str(shape) for shape, _ in results]
    differ = shapes != [str(shape) for shape, _ in compared]
    return " and ".join(shapes if differ else [str(dtype) for _, dtype in results])

"""Dtypes of operators that read tensors in place of Python numbers.

A Python number never widens a floating-point tensor; a tensor without dimensions widens others
without dimensions, such as losses.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SAMPLES = {torch.bool: True, torch.int64: 1, torch.float64: 1.0}
"""A Python number of the type for which a tensor of this dtype stands."""

_HALF = (torch.float16, torch.bfloat16)


class NumberPromotion:
    """The dtypes of the arguments and the result of one operator.

    Args:
        tensors: the tensors that the operator reads, besides those in place of numbers.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        numeric = [tensor for tensor in tensors if tensor.dtype != torch.bool] or tensors
        self._tensors = [tensor for tensor in numeric if tensor.ndim] or numeric
        self._result: torch.dtype | None = None

    def argument(self, number: Tensor) -> Tensor:
        """The tensor in place of a number, in a dtype that widens no other argument."""
        if not self._tensors:
            return number
        types = [torch.result_type(each, _SAMPLES[number.dtype]) for each in self._tensors]
        dtype = functools.reduce(torch.promote_types, types)
        if all(torch.result_type(each, number) == dtype for each in self._tensors):
            return number
        if dtype in _HALF:
            # PyTorch computes with the number in single precision, and rounds the result alone.
            self._result, dtype = dtype, torch.float32
        return number.to(dtype)

    def result(self, result: Any) -> Any:
        """The result of the operator, in the dtype that it has with numbers."""
        is_wider = isinstance(result, Tensor) and result.dtype == torch.float32
        return result.to(self._result) if is_wider and self._result is not None else result

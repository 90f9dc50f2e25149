"""Dtype promotion of operators that read tensors where the user's code has Python numbers.

A Python number never promotes a floating-point tensor to a wider dtype. A tensor without dimensions
can promote other tensors without dimensions, such as losses. A number alone makes a tensor of the
default dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SAMPLES = {torch.bool: True, torch.int64: 1, torch.float64: 1.0}
"""Example of a Python number for each dtype of tensors that replace Python numbers."""

_HALF = (torch.float16, torch.bfloat16)


class NumberPromotion:
    """Dtype promotion of one operator whose Python number arguments are traced as tensors.

    Args:
        tensors: tensors that the operator reads, without the tensors that replace numbers.
        made: the result of the operator with Python numbers, where it is known.
    """

    def __init__(self, tensors: Sequence[Tensor], made: Any = None) -> None:
        # A mask, as the condition of `torch.where`, promotes nothing where there are other tensors.
        numeric = [tensor for tensor in tensors if tensor.dtype != torch.bool] or tensors
        # `torch.result_type` ranks tensors with dimensions above those without.
        self._tensors = [tensor for tensor in numeric if tensor.ndim] or numeric
        self._result: torch.dtype | None = None
        # `torch.tensor(0.5)` is of the default dtype, and a copy of a tensor of float64 is not.
        self._made = made.dtype if not tensors and isinstance(made, Tensor) else None

    def argument(self, number: Tensor) -> Tensor:
        """Cast a tensor that replaces a number to a dtype that promotes no other argument."""
        if not self._tensors:
            return number
        types = [torch.result_type(each, _SAMPLES[number.dtype]) for each in self._tensors]
        dtype = functools.reduce(torch.promote_types, types)
        # Without a cast the number keeps the precision of float64 or int64.
        if all(torch.result_type(each, number) == dtype for each in self._tensors):
            return number
        if dtype in _HALF:
            # PyTorch computes with the number in single precision, and rounds the result alone.
            self._result, dtype = dtype, torch.float32
        return number.to(dtype)

    def result(self, result: Any) -> Any:
        """Cast the result of the operator to the dtype that it has with Python numbers."""
        if self._made is not None and isinstance(result, Tensor):
            return result.to(self._made)
        is_wider = isinstance(result, Tensor) and result.dtype == torch.float32
        return result.to(self._result) if is_wider and self._result is not None else result

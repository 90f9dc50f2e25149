"""Sizes that are tensors without dimensions, as in `F.interpolate(x, size=(height, width))`, where
capture computes the values: PyTorch reads them below the functions that a mode observes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.core.torch_internals import pytree

_OF_SIZES = {
    *(F.interpolate, F.unfold, F.fold, F.pad, F.adaptive_avg_pool2d, F.avg_pool2d, F.max_pool2d),
    *(torch.reshape, torch.narrow, torch.split, torch.multinomial),
    *(Tensor.view, Tensor.reshape, Tensor.expand, Tensor.repeat, Tensor.narrow, Tensor.split),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty),
}
"""Functions whose arguments after a first tensor are numbers."""

_FACTORIES = {torch.zeros, torch.ones, torch.empty, torch.arange}
"""Functions whose arguments are all numbers."""


def with_known_sizes(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value_of: Callable[[Tensor], Tensor | None],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with numbers in place of the tensors that are sizes.

    Args:
        value_of: returns the value of a traced tensor, or None if it is unknown.
    """
    first = args[0] if args and func not in _FACTORIES else None

    def number(tensor: Any) -> Any:
        is_number = isinstance(tensor, Tensor) and not tensor.ndim and tensor is not first
        value = value_of(tensor) if is_number and not tensor.is_floating_point() else None
        return tensor if value is None else int(value)

    def with_numbers(entry: Any) -> Any:
        if not isinstance(entry, slice):
            return entry
        return slice(number(entry.start), number(entry.stop), number(entry.step))

    if func is Tensor.__getitem__:
        index = args[1]
        entries = tuple(map(with_numbers, index)) if isinstance(index, tuple) else index
        return (args[0], with_numbers(entries)), dict(kwargs)
    if func not in _OF_SIZES and func not in _FACTORIES:
        return args, dict(kwargs)
    numbers: tuple[tuple[Any, ...], dict[str, Any]]
    numbers = pytree.tree_map_only(Tensor, number, (args, dict(kwargs)))
    return numbers

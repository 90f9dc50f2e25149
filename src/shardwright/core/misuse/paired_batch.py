"""Find out whether a function pairs the rows of a batch with those of another tensor.

The function is called on the meta device with changed sizes. If it runs when the other tensor is as
long as the batch, and fails when their lengths differ, it pairs their rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, count
from typing import Any

import torch
from torch import Tensor

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import (
    without_dispatch_modes,
    without_torch_function_of_subclasses,
)

MOST_SUBSETS_OF = 4
"""Up to this number of candidate tensors all subsets are tried; of more, only all and each one."""

BY_VALUES = {
    *("__getitem__", "__setitem__", "index_put", "index_put_", "masked_select"),
    *("allclose", "equal"),
}
"""Functions that need data, so they run on the CPU; they check shapes before they read data."""

UNCHECKED = {
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
}
"""Functions that must not be called with changed sizes: their kernels read out of bounds."""

BatchDims = frozenset[int]
PartDim = tuple[Tensor, int]
"""A tensor, and the dimension that may be a shard of the batch."""


@dataclass(frozen=True)
class BatchSizes:
    """Numbers of rows of the batch of a call.

    Args:
        local: rows that this rank passed.
        whole: rows of all ranks.
    """

    local: int
    whole: int


@dataclass(frozen=True)
class BatchCall:
    """A call of a PyTorch function with tensors of the global batch.

    Args:
        function, args, kwargs: the call.
        sizes: the sizes of the batch.
        batch_dims: for each tensor of the global batch, by its id, the dimensions with its rows or,
            if it is flattened with other dimensions, with a multiple of them.
        others: the tensors that do not depend on the batch.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: BatchSizes
    batch_dims: Mapping[int, BatchDims]
    others: Sequence[Tensor]

    def paired_parts(self) -> tuple[Tensor, ...]:
        """Tensors with the size of this rank's shard whose rows the function would pair with those
        of the global batch."""
        parts = [part for other in self.others for part in self._parts_of(other)]
        if not parts:
            return ()
        rows, other_rows = self._unusual_sizes()
        for chosen in _subsets(parts):
            for with_whole in (True, False):
                if self._runs(chosen, rows, rows, with_whole) and not self._runs(
                    chosen, rows, other_rows, with_whole
                ):
                    return tuple({id(tensor): tensor for tensor, _ in chosen}.values())
        return ()

    def dims_of_results(self, results: Sequence[Any]) -> list[BatchDims]:
        """The batch dimensions of each result."""
        rows, _ = self._unusual_sizes()
        for with_whole in (True, False):
            others = self._resized_whole(rows) if with_whole else {}
            leaves = _leaves_for(self, self._resized_batch(rows) | others)
            if leaves is not None and len(leaves) == len(results):
                return [_multiples(leaf, rows) for leaf in leaves]
        return [self._likely_dims(result) for result in results]

    def _parts_of(self, other: Tensor) -> list[PartDim]:
        """The dimensions of a tensor that may be this rank's shard of the batch."""
        sizes = enumerate(other.shape)
        return [(other, dim) for dim, size in sizes if self._is_of_batch(self.sizes.local, size)]

    def _runs(self, chosen: Sequence[PartDim], rows: int, part_rows: int, with_whole: bool) -> bool:
        """Whether the function runs for a batch of `rows` rows and shards of `part_rows` rows."""
        shapes = {id(tensor): tuple(tensor.shape) for tensor, _ in chosen}
        for tensor, dim in chosen:
            shape = shapes[id(tensor)]
            shapes[id(tensor)] = _scaled(shape, (dim,), self.sizes.local, part_rows)
        whole = self._resized_whole(rows) if with_whole else {}
        return _leaves_for(self, whole | self._resized_batch(rows) | shapes) is not None

    def _resized_batch(self, rows: int) -> dict[int, tuple[int, ...]]:
        """Shapes of the tensors of the global batch, resized to `rows` rows, by id."""
        return {
            id(tensor): _scaled(tensor.shape, self.batch_dims[id(tensor)], self.sizes.whole, rows)
            for tensor in self.tensors
            if id(tensor) in self.batch_dims
        }

    def _resized_whole(self, rows: int) -> dict[int, tuple[int, ...]]:
        """Shapes of other tensors as long as the batch, such as gathered labels, resized to `rows`
        rows, by id."""
        return {
            id(other): _scaled(other.shape, (0,), self.sizes.whole, rows)
            for other in self.others
            if other.ndim and self._is_of_batch(self.sizes.whole, other.shape[0])
        }

    def _is_of_batch(self, rows: int, size: int) -> bool:
        """Whether `size` relates to `rows` like a batch dimension to all rows of the batch."""
        return any(
            size * self.sizes.whole == tensor.shape[dim] * rows
            for tensor in self.tensors
            for dim in self.batch_dims.get(id(tensor), ())
        )

    @property
    def tensors(self) -> list[Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _unusual_sizes(self) -> tuple[int, int]:
        """Two ascending primes larger than the batch that divide no size of a tensor, so that
        resized dimensions are recognized in results."""
        shapes = {size for tensor in self.tensors for size in tensor.shape}
        fitting = (
            size
            for size in _primes_above(max(self.sizes.whole, 10))
            if all(each % size for each in shapes if each)
        )
        return next(fitting), next(fitting)

    def _likely_dims(self, result: Any) -> BatchDims:
        """Guess the batch dimensions of a result of a function that cannot run without data."""
        if not isinstance(result, Tensor):
            return frozenset()
        for tensor in self.tensors:
            if id(tensor) in self.batch_dims and tensor.shape == result.shape:
                return self.batch_dims[id(tensor)]
        return dims_of_size(result.shape, self.sizes.whole)


def dims_of_new(
    kind: type[Tensor], results: Sequence[Any], given: Sequence[Tensor], call: BatchCall | None
) -> dict[int, BatchDims]:
    """The batch dimensions of each result, by its index, that is a new tensor of class `kind`.

    Args:
        kind: the class.
        results: the leaves of the function's result.
        given: the tensors that the function was called with.
        call: the call; None if none of the tensors has rows of a batch.
    """
    argument_ids = {id(tensor) for tensor in given}
    new = [
        number
        for number, result in enumerate(results)
        if type(result) is kind and id(result) not in argument_ids
    ]
    if call is None or not any(results[number].ndim for number in new):
        return dict.fromkeys(new, frozenset())
    with without_torch_function_of_subclasses():
        dims = call.dims_of_results(results)
    return {number: dims[number] for number in new}


def dims_of_size(shape: Sequence[int], rows: int) -> BatchDims:
    """The first dimension of size `rows`, otherwise the first with a multiple of it."""
    equal = [dim for dim, size in enumerate(shape) if size == rows]
    multiple = [dim for dim, size in enumerate(shape) if size and size % rows == 0]
    return frozenset((equal or multiple)[:1])


def _leaves_for(call: BatchCall, shapes: Mapping[int, tuple[int, ...]]) -> list[Any] | None:
    """Call the function with other shapes; returns the leaves of its result, None if it raises.

    Args:
        call: the call.
        shapes: the changed shapes, by the id of the tensor.
    """
    name = getattr(call.function, "__name__", "")
    if name in UNCHECKED:
        return None
    for device in ("meta", "cpu") if name in BY_VALUES else ("meta",):
        try:
            return _called(call, shapes, device)
        except Exception as error:  # Any function may be called.
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                return None
    return None


def _called(call: BatchCall, shapes: Mapping[int, tuple[int, ...]], device: str) -> list[Any]:
    def like(tensor: Tensor) -> Tensor:
        # Autocast, which is not active here, may have cast all to one dtype.
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        shape = shapes.get(id(tensor), tuple(tensor.shape))
        return torch.zeros(shape, dtype=dtype, device=device)

    stand_ins = {id(tensor): like(tensor) for tensor in call.tensors}
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: stand_ins[id(tensor)], (call.args, dict(call.kwargs))
    )
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        without_dispatch_modes(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return list(pytree.tree_leaves(call.function(*args, **kwargs)))


def _scaled(shape: Sequence[int], dims: Iterable[int], old: int, new: int) -> tuple[int, ...]:
    """The shape with `new` instead of `old` rows of the batch in `dims`."""
    result = list(shape)
    for dim in dims:
        if result[dim] % old == 0:
            result[dim] = result[dim] // old * new
    return tuple(result)


def _multiples(leaf: Any, rows: int) -> BatchDims:
    shape = leaf.shape if isinstance(leaf, Tensor) else ()
    return frozenset(dim for dim, size in enumerate(shape) if size and size % rows == 0)


def _subsets(parts: Sequence[PartDim]) -> Iterator[tuple[PartDim, ...]]:
    """Subsets of the candidates, the largest first."""
    every = range(len(parts), 0, -1) if len(parts) <= MOST_SUBSETS_OF else (len(parts), 1)
    return chain.from_iterable(combinations(parts, size) for size in every)


def _primes_above(number: int) -> Iterator[int]:
    return (n for n in count(number + 1) if all(n % d for d in range(2, int(n**0.5) + 1)))

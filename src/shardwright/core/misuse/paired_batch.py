"""Detect whether a function pairs samples of the global batch with samples of a local batch.

The function is called on the meta device with changed batch sizes. If the call succeeds when both
batches have the same size, and fails when their sizes differ, the function pairs their samples. A
*candidate* is a dimension of a tensor that may be the batch dimension of this rank's local batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from itertools import count as count_from
from typing import Any

import torch
from torch import Tensor

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import (
    without_dispatch_modes,
    without_torch_function_of_subclasses,
)

MAX_CANDIDATES_FOR_ALL_SUBSETS = 4
"""Maximum number of candidates of which all subsets are tried. With more, only the set of all and
each single candidate are tried, as the number of subsets is exponential."""

NEED_DATA = {
    *("__getitem__", "__setitem__", "index_put", "index_put_", "masked_select"),
    *("allclose", "equal"),
}
"""Functions that do not run on the meta device, and are called with zeros on the CPU instead. These
functions check shapes before they read values."""

UNSAFE_TO_RESIZE = {
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
}
"""Functions that must not be called with changed sizes: their kernels read out of bounds."""

BatchDims = frozenset[int]
CandidateDim = tuple[Tensor, int]
"""A tensor, and the index of a dimension that may be the batch dimension of the local batch."""


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes of a call, in samples.

    Args:
        local: size of the local batch that this rank passed.
        total: size of the global batch.
    """

    local: int
    total: int


@dataclass(frozen=True)
class BatchCall:
    """A call of a PyTorch function with tensors of the global batch.

    Args:
        function: the called function, with its `args` and `kwargs`.
        sizes: sizes of the local and of the global batch.
        batch_dims: batch dimensions of the tensors computed from outputs of the global batch, by
            tensor id. The size of a batch dimension is the global batch size or, if it is flattened
            with other dimensions, a multiple.
        others: the tensor arguments that are not computed from outputs, such as labels.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: BatchSizes
    batch_dims: Mapping[int, BatchDims]
    others: Sequence[Tensor]

    def paired_shards(self) -> tuple[Tensor, ...]:
        """Return the tensors of this rank's local batch whose samples the function would pair with
        samples of the global batch."""
        candidates = [each for other in self.others for each in self._candidate_dims(other)]
        if not candidates:
            return ()
        batch_size, other_size = self._recognizable_sizes()
        for subset in _candidate_subsets(candidates):
            # Gathered labels must be resized with the global batch; constants of its size must not.
            for resize_global in (True, False):
                if self._accepts_sizes(subset, batch_size, batch_size, resize_global) and not (
                    self._accepts_sizes(subset, batch_size, other_size, resize_global)
                ):
                    return tuple({id(tensor): tensor for tensor, _ in subset}.values())
        return ()

    def dims_of_results(self, results: Sequence[Any]) -> list[BatchDims]:
        """Return the batch dimensions of each of `results`, the leaves of the call's result."""
        batch_size, _ = self._recognizable_sizes()
        for resize_global in (True, False):
            others = self._resized_global_shapes(batch_size) if resize_global else {}
            leaves = _call_with_shapes(self, self._resized_batch_shapes(batch_size) | others)
            if leaves is not None and len(leaves) == len(results):
                return [_dims_with_multiples(leaf, batch_size) for leaf in leaves]
        return [self._guess_batch_dims(result) for result in results]

    def _candidate_dims(self, tensor: Tensor) -> list[CandidateDim]:
        sizes = enumerate(tensor.shape)
        return [(tensor, dim) for dim, size in sizes if self._is_batch_dim(self.sizes.local, size)]

    def _accepts_sizes(
        self, shards: Sequence[CandidateDim], batch_size: int, shard_size: int, resize_global: bool
    ) -> bool:
        """Whether the call succeeds with other sizes of the global batch and of the local batch.

        Args:
            shards: candidates to resize as batch dimensions of the local batch.
            batch_size: size to which the global batch is resized.
            shard_size: size to which the local batch is resized.
            resize_global: whether to resize tensors in `others` with the global batch size.
        """
        shapes = {id(tensor): tuple(tensor.shape) for tensor, _ in shards}
        for tensor, dim in shards:
            shape = shapes[id(tensor)]
            shapes[id(tensor)] = _resized_shape(shape, (dim,), self.sizes.local, shard_size)
        others = self._resized_global_shapes(batch_size) if resize_global else {}
        shapes = others | self._resized_batch_shapes(batch_size) | shapes
        return _call_with_shapes(self, shapes) is not None

    def _resized_batch_shapes(self, batch_size: int) -> dict[int, tuple[int, ...]]:
        """Return the shapes of tensors in `batch_dims`, by tensor id, with batch dimensions resized
        to `batch_size`."""
        return {
            id(tensor): _resized_shape(
                tensor.shape, self.batch_dims[id(tensor)], self.sizes.total, batch_size
            )
            for tensor in self.tensors
            if id(tensor) in self.batch_dims
        }

    def _resized_global_shapes(self, batch_size: int) -> dict[int, tuple[int, ...]]:
        """Return the shapes of tensors in `others` whose dimension 0 has the global batch size, by
        tensor id, with dimension 0 resized to `batch_size`."""
        return {
            id(other): _resized_shape(other.shape, (0,), self.sizes.total, batch_size)
            for other in self.others
            if other.ndim and self._is_batch_dim(self.sizes.total, other.shape[0])
        }

    def _is_batch_dim(self, batch_size: int, size: int) -> bool:
        """Whether `size` would be the size of a batch dimension of one of `tensors` in a batch of
        `batch_size` samples."""
        return any(
            size * self.sizes.total == tensor.shape[dim] * batch_size
            for tensor in self.tensors
            for dim in self.batch_dims.get(id(tensor), ())
        )

    @property
    def tensors(self) -> list[Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _recognizable_sizes(self) -> tuple[int, int]:
        """Return two ascending primes, larger than the global batch size, that divide no size of a
        tensor argument, so that dimensions resized to them are recognized in results."""
        sizes = {size for tensor in self.tensors for size in tensor.shape}
        primes = (
            prime
            for prime in _primes_above(max(self.sizes.total, 10))
            if all(size % prime for size in sizes if size)
        )
        return next(primes), next(primes)

    def _guess_batch_dims(self, result: Any) -> BatchDims:
        """Guess the batch dimensions of a result from its shape, for calls that cannot be
        resized."""
        if not isinstance(result, Tensor):
            return frozenset()
        for tensor in self.tensors:
            if id(tensor) in self.batch_dims and tensor.shape == result.shape:
                return self.batch_dims[id(tensor)]
        return dim_of_size(result.shape, self.sizes.total)


def batch_dims_of_new_tensors(
    tensor_class: type[Tensor],
    results: Sequence[Any],
    arguments: Sequence[Tensor],
    call: BatchCall | None,
) -> dict[int, BatchDims]:
    """Return the batch dimensions of each result that is a new tensor, by index of the result.

    Args:
        tensor_class: exact class of the results to include.
        results: the leaves of a function's result.
        arguments: the tensors that the function was called with; results among them are not new.
        call: the call of the function; None if no argument has a batch dimension.
    """
    argument_ids = {id(tensor) for tensor in arguments}
    new = [
        index
        for index, result in enumerate(results)
        if type(result) is tensor_class and id(result) not in argument_ids
    ]
    if call is None or not any(results[index].ndim for index in new):
        return dict.fromkeys(new, frozenset())
    with without_torch_function_of_subclasses():
        dims = call.dims_of_results(results)
    return {index: dims[index] for index in new}


def dim_of_size(shape: Sequence[int], batch_size: int) -> BatchDims:
    """Return the first dimension of size `batch_size`, otherwise the first whose size is a multiple
    of `batch_size`; empty if no size matches."""
    equal = [dim for dim, size in enumerate(shape) if size == batch_size]
    multiple = [dim for dim, size in enumerate(shape) if size and size % batch_size == 0]
    return frozenset((equal or multiple)[:1])


def _call_with_shapes(call: BatchCall, shapes: Mapping[int, tuple[int, ...]]) -> list[Any] | None:
    """Repeat a call with other shapes, on meta tensors or zeros.

    Args:
        call: the call to repeat.
        shapes: the changed shapes, by tensor id.

    Returns:
        The leaves of the result; None if the call fails, or cannot run with other shapes.
    """
    name = getattr(call.function, "__name__", "")
    if name in UNSAFE_TO_RESIZE:
        return None
    for device in ("meta", "cpu") if name in NEED_DATA else ("meta",):
        try:
            return _call_on_device(device, call, shapes)
        except Exception as error:  # `call.function` may raise any exception
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                return None
    return None


def _call_on_device(
    device: str, call: BatchCall, shapes: Mapping[int, tuple[int, ...]]
) -> list[Any]:
    def zeros_for(tensor: Tensor) -> Tensor:
        # Tensors of different dtypes may have been legal under autocast, which is not active here.
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        shape = shapes.get(id(tensor), tuple(tensor.shape))
        return torch.zeros(shape, dtype=dtype, device=device)

    stand_ins = {id(tensor): zeros_for(tensor) for tensor in call.tensors}
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


def _resized_shape(
    shape: Sequence[int], dims: Iterable[int], old: int, new: int
) -> tuple[int, ...]:
    """Return `shape` with the sizes of `dims` scaled from batch size `old` to batch size `new`.

    Sizes that `old` does not divide are unchanged.
    """
    result = list(shape)
    for dim in dims:
        if result[dim] % old == 0:
            result[dim] = result[dim] // old * new
    return tuple(result)


def _dims_with_multiples(leaf: Any, batch_size: int) -> BatchDims:
    shape = leaf.shape if isinstance(leaf, Tensor) else ()
    return frozenset(dim for dim, size in enumerate(shape) if size and size % batch_size == 0)


def _candidate_subsets(candidates: Sequence[CandidateDim]) -> Iterator[tuple[CandidateDim, ...]]:
    """Yield subsets of the candidates, the largest first."""
    count = len(candidates)
    sizes = range(count, 0, -1) if count <= MAX_CANDIDATES_FOR_ALL_SUBSETS else (count, 1)
    return chain.from_iterable(combinations(candidates, size) for size in sizes)


def _primes_above(number: int) -> Iterator[int]:
    return (n for n in count_from(number + 1) if all(n % d for d in range(2, int(n**0.5) + 1)))

"""Sharded outputs of a planned model, which are gathered where they meet ordinary tensors.

Results of operators on such outputs alone stay sharded, as of any DTensor. Labels, weights and
losses of the user's code are ordinary tensors: where an operator has one as input, where Python or
numpy reads values, and where DTensors lack an operator, all ranks gather the output and continue
with ordinary tensors. Gradients are sharded again on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.misuse.paired_batch import BatchCall, BatchDims, batch_dims_of_new_tensors
from shardwright.core.misuse.whole_batch import OutputBatch
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import without_torch_function_of_subclasses
from shardwright.errors import MixedTensorsError

_READS = {
    *("item", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
    *("__contains__", "__format__"),
}
"""Methods by which Python reads values."""

_WRITES = {
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "__set__"),
}
"""In-place methods whose names do not end with `_`."""

_BACKWARD = (Tensor.backward, torch.autograd.backward)


def in_parts(
    tensor: DTensor, batch: OutputBatch | None = None, dims: BatchDims | None = None
) -> OutputTensor:
    """Makes `tensor` an `OutputTensor`, in place.

    Args:
        batch: the whole batch it belongs to, if each rank passes its own part.
        dims: batch dimensions of `tensor`; by default the first of the batch's size.
    """
    # In place, as a new object would have a different autograd history.
    tensor.__class__ = OutputTensor
    assert isinstance(tensor, OutputTensor)
    if batch is not None:
        tensor.batch = batch
        tensor.batch_dims = batch.dims_in(tensor.shape) if dims is None else dims
    return tensor


class OutputTensor(DTensor):
    """A DTensor that all ranks gather where an ordinary tensor meets it or Python reads it."""

    __slots__ = ()

    batch: OutputBatch | None = None
    batch_dims: BatchDims = frozenset()

    def full_tensor(self, **options: Any) -> Tensor:
        """Gather the full tensor on all ranks."""
        full = super().full_tensor(**options)
        return full if self.batch is None else self.batch.mark(full, self.batch_dims)

    def numpy(self, *, force: bool = False) -> Any:
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in _BACKWARD:
            return _backward(func, args, kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        alone = func is torch.autograd.grad or all(isinstance(one, DTensor) for one in given)
        reason: RuntimeError | None = None
        if alone and name not in _READS:
            try:
                with without_torch_function_of_subclasses():
                    results = func(*args, **kwargs)
            except MixedTensorsError:
                raise
            except RuntimeError as error:  # an operator that DTensors lack
                if func is torch.autograd.grad:
                    raise
                reason = error
            else:
                _stay_in_parts(results, func, args, kwargs, given)
                return results
        if _changed(name, args, kwargs):
            raise MixedTensorsError(
                f"{name or func} would change an output of a planned model, which is sharded,"
                " by ordinary tensors or by an operator that DTensors lack\ncompute a"
                " new tensor instead (`y = y + x` for `y += x`), or change `y.full_tensor()`"
            ) from reason
        args, kwargs = pytree.tree_map_only(cls, cls.full_tensor, (args, kwargs))
        return func(*args, **kwargs)


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass. Gradients that are passed as ordinary tensors are those of gathered
    outputs; `inputs` are not gathered, as their own `.grad` is accumulated into."""
    inputs = {key: kwargs[key] for key in ("inputs",) if key in kwargs}
    given = args, {key: value for key, value in kwargs.items() if key not in inputs}
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        given = pytree.tree_map_only(OutputTensor, OutputTensor.full_tensor, given)
    with without_torch_function_of_subclasses():
        return func(*given[0], **given[1], **inputs)


def _stay_in_parts(
    results: Any, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]
) -> None:
    """Make `OutputTensor`s of the DTensors that a function returns."""
    leaves = pytree.tree_leaves(results)
    outputs = [one for one in given if isinstance(one, OutputTensor)]
    batch = next((one.batch for one in outputs if one.batch), None)
    of_batch = {id(one): one.batch_dims for one in outputs if one.batch_dims}
    call = None
    if batch is not None and of_batch:
        call = BatchCall(func, args, kwargs, batch.sizes, of_batch, ())
    for number, dims in batch_dims_of_new_tensors(DTensor, leaves, given, call).items():
        in_parts(leaves[number], batch, dims)


def _changed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of this name modifies an output in place."""
    changes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
    written = [*args[:1]] if changes else []
    return any(
        isinstance(x, OutputTensor) for x in pytree.tree_leaves((written, kwargs.get("out")))
    )

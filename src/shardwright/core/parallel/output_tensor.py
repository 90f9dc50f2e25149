"""Sharded outputs of a planned model, gathered when they are combined with ordinary tensors.

Operators whose tensor arguments are all DTensors return DTensors, as usual. DTensor raises an error
for a mix with ordinary tensors, but labels, weights and losses of the user's code are ordinary. So
the output is gathered on all ranks by an operator with an ordinary argument, by an operator that
DTensor does not implement, and by Python or numpy reading values. The backward pass shards the
gradient again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import without_torch_function_of_subclasses
from shardwright.errors import MixedTensorsError

_READS = {
    *("item", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
    *("__contains__", "__format__"),
}
"""Methods with which Python reads the values of a tensor."""

_WRITES = {
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "__set__"),
}
"""In-place methods whose names do not end with `_`."""

_BACKWARD = (Tensor.backward, torch.autograd.backward)


def as_output_tensor(
    tensor: DTensor, watch: Callable[[Tensor], None] | None = None
) -> OutputTensor:
    """Convert a sharded output of a planned model to an `OutputTensor`, in place.

    Args:
        tensor: an output of the model, or a tensor computed from one.
        watch: function that registers a check that all ranks pass equal gradients for the gathered
            tensor; None on a single rank.
    """
    # In place: a view would be another autograd node, which `retain_grad`, hooks and
    # `torch.autograd.grad` distinguish from the output.
    tensor.__class__ = OutputTensor
    assert isinstance(tensor, OutputTensor)
    if watch is not None:
        tensor.watch = watch
    return tensor


class OutputTensor(DTensor):
    """A DTensor that is gathered on all ranks when an operator combines it with an ordinary tensor,
    or Python reads its values."""

    __slots__ = ()

    watch: Callable[[Tensor], None] | None = None

    def full_tensor(self, **options: Any) -> Tensor:
        """Gather the full tensor on all ranks, with a check that ranks pass equal gradients for
        it."""
        full = super().full_tensor(**options)
        if self.watch is not None:
            self.watch(full)
        return full

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
            return _run_backward_of_outputs(func, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # `torch.autograd.grad` does not combine outputs, inputs and gradients in one operator.
        only_dtensors = func is torch.autograd.grad or all(
            isinstance(tensor, DTensor) for tensor in tensors
        )
        reason: RuntimeError | None = None
        if only_dtensors and name not in _READS:
            try:
                # Otherwise `func` would call this `__torch_function__` again.
                with without_torch_function_of_subclasses():
                    results = func(*args, **kwargs)
            except MixedTensorsError:
                raise
            # DTensor has no sharding strategy for the operator (NotImplementedError is a subclass).
            except RuntimeError as error:
                if func is torch.autograd.grad:
                    raise
                reason = error
            else:
                _convert_to_output_tensors(results, tensors)
                return results
        if _is_in_place_on_output(name, args, kwargs):
            # In-place changes of the gathered copy would be lost.
            raise MixedTensorsError(
                f"{name or func} cannot change a sharded output of a planned model in place: its"
                " other arguments are not DTensors, or DTensor does not implement it\ncompute a"
                " new tensor instead (`y = y + x` for `y += x`), or change `y.full_tensor()`"
            ) from reason
        # Differentiable: `full_tensor` is an all-gather whose gradient is sharded again.
        args, kwargs = pytree.tree_map_only(cls, cls.full_tensor, (args, kwargs))
        return func(*args, **kwargs)


def _run_backward_of_outputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, a `backward` function of autograd, on outputs of a planned model.

    Autograd cannot mix DTensors and ordinary tensors: if any output or gradient is an ordinary
    tensor, all are gathered. Tensors in the argument `inputs` stay, since autograd accumulates into
    their `.grad`.
    """
    inputs = {key: kwargs[key] for key in ("inputs",) if key in kwargs}
    arguments = args, {key: value for key, value in kwargs.items() if key not in inputs}
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        arguments = pytree.tree_map_only(OutputTensor, OutputTensor.full_tensor, arguments)
    with without_torch_function_of_subclasses():
        return func(*arguments[0], **arguments[1], **inputs)


def _convert_to_output_tensors(results: Any, tensors: Sequence[Tensor]) -> None:
    """Convert the DTensors that a function has created to `OutputTensor`s, in place.

    Args:
        results: return value of the function.
        tensors: the tensors among its arguments.
    """
    arguments = {id(tensor) for tensor in tensors}
    watches = (t.watch for t in tensors if isinstance(t, OutputTensor) and t.watch is not None)
    watch = next(watches, None)
    for leaf in pytree.tree_leaves(results):
        # A function may return an argument, such as a parameter.
        if type(leaf) is DTensor and id(leaf) not in arguments:
            as_output_tensor(leaf, watch)


def _is_in_place_on_output(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call of `name` with these arguments changes an `OutputTensor` in place."""
    # Dunder methods end with `__`; those that write are listed in `_WRITES`.
    changes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
    written = [*args[:1]] if changes else []
    return any(
        isinstance(x, OutputTensor) for x in pytree.tree_leaves((written, kwargs.get("out")))
    )

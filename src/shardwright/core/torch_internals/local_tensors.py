"""Simulation of many ranks in one process: `LocalTensor`, which holds a tensor of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    _combine_rank_results,
    _map_to_rank_local_val,
    get_local_tensor_mode_list,
)
from torch.distributed._local_tensor import LocalTensorMode as TorchLocalTensorMode
from torch.utils._python_dispatch import _pop_mode, _push_mode

aten = torch.ops.aten

_LOCAL_NAMESPACES = ("aten", "prims", "profiler")
"""Namespaces of operators that do not communicate."""


def int_by_rank(values: Mapping[int, int]) -> torch.SymInt:
    """Make an int that differs between simulated ranks.

    Args:
        values: the value of each rank.
    """
    return torch.SymInt(LocalIntNode(dict(values)))  # type: ignore[no-untyped-call]


def is_simulating_ranks() -> bool:
    """Whether a `LocalTensorMode` is active."""
    return bool(get_local_tensor_mode_list())


class LocalTensorMode(TorchLocalTensorMode):  # type: ignore[no-untyped-call]
    """PyTorch's `LocalTensorMode`, with a faster path for most operators.

    PyTorch's mode updates random generators and aliases of storages for every operator, which takes
    most of its time. This mode updates generators for random operators only, and gives views the
    storage of their base directly.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # The gradient of `sgn`, which has no memory: kernels below this mode would read it.
        if func is aten._efficientzerotensor.default:
            func = aten.zeros.default
        # Backward formulas take the conjugate of complex numbers in Python, which PyTorch's mode
        # rejects: a view of a number cannot have the number's type.
        if args and isinstance(args[0], complex):
            with self.disable():
                return func(*args, **kwargs)
        # Sizes are read for each new tensor: searching all arguments would take longer.
        if func is aten.sym_size.default and isinstance(args[0], LocalTensor):
            return tuple(args[0]._size)
        if func is aten.dim.default and isinstance(args[0], LocalTensor):
            return len(args[0]._size)
        subclass = _find_tensor_class(args, kwargs)
        # All ranks share these tensors, so one result is that of all of them.
        if subclass is Tensor and func.namespace in _LOCAL_NAMESPACES:
            return func(*args, **kwargs)
        if subclass is LocalTensor and _is_rank_local_operator(func):
            result = _call_on_each_rank(func, self.ranks, args, kwargs)
            if func.is_view:
                # With this mode, as PyTorch would enter its own mode for each size that is read.
                with _push_dispatch_mode(self):
                    _share_storage(result, args[0])
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _push_dispatch_mode(mode: TorchLocalTensorMode) -> Iterator[None]:
    """Context manager in which `mode` is active inside its own `__torch_dispatch__`."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


def _share_storage(views: Tensor | Sequence[Tensor], tensor: Tensor) -> None:
    """Give views the storage of their base `tensor`; aliasing is detected by equal storages."""
    # Operators such as `split` return several views.
    for view in [views] if isinstance(views, Tensor) else views:
        torch._functionalize_unsafe_set(view, tensor)


def _call_on_each_rank(
    func: Any, ranks: Iterable[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    # Function modes would be called for each attribute of a tensor that is read.
    with torch._C.DisableTorchFunction():
        results = {
            rank: func(
                *(_select_argument_of_rank(arg, rank) for arg in args),
                **{key: _select_argument_of_rank(arg, rank) for key, arg in kwargs.items()},
            )
            for rank in sorted(ranks)
        }
        # `_is_rank_local_operator` admits in-place operators that return their first argument.
        if func._schema.is_mutable:
            return args[0]
        default = None
        if func is torch.ops.aten.split.Tensor:
            # A rank with a shorter dimension may have fewer blocks: the others are empty.
            blocks, dim = results[min(results)], args[2] if len(args) > 2 else 0
            default = torch.narrow(blocks[0], dim, 0, 0)
        return _combine_rank_results(results, default)


@cache
def _is_rank_local_operator(func: Any) -> bool:
    """Whether an operator has no effects on a rank other than new tensors, views, or an in-place
    change of its first argument."""
    if func.namespace != "aten":
        return False
    # PyTorch's mode keeps a random generator for each rank, and updates the sizes of the
    # `LocalTensor` after an in-place view such as `t_`.
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
    if not tags.isdisjoint(func.tags):
        return False
    schema = func._schema
    if not schema.is_mutable:
        return True
    written = [argument.is_write for argument in schema.arguments]
    # An operator with `out=` writes its last argument.
    return written[0] and not any(written[1:]) and schema.name.endswith("_")


def _find_tensor_class(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type | None:
    """Return `LocalTensor` if an argument is a `LocalTensor`, else `Tensor` if an argument is a
    tensor; None without tensors, or if an argument is of another subclass."""
    common: type | None = None
    stack: list[Any] = [*args, *kwargs.values()]
    while stack:
        arg = stack.pop()
        if isinstance(arg, LocalTensor):
            common = LocalTensor
        elif isinstance(arg, Tensor):
            if type(arg) not in (Tensor, nn.Parameter):
                return None
            common = common or Tensor
        elif isinstance(arg, list | tuple):
            stack += arg
    return common


def _select_argument_of_rank(arg: Any, rank: int) -> Any:
    if isinstance(arg, list | tuple):
        return [_select_argument_of_rank(each, rank) for each in arg]
    return _map_to_rank_local_val(arg, rank)


def tensors_by_rank(tensor: Tensor) -> dict[int, Tensor] | None:
    """Return the tensor of each simulated rank; None for a tensor that all ranks share."""
    return dict(tensor._local_tensors) if isinstance(tensor, LocalTensor) else None


def tensor_of_ranks(tensors: Mapping[int, Tensor]) -> Tensor:
    """Make a tensor that differs between simulated ranks.

    Args:
        tensors: the tensor of each rank.
    """
    with get_local_tensor_mode_list()[-1].disable():
        result: Tensor = LocalTensor(dict(tensors))  # type: ignore[no-untyped-call]
        return result


@contextmanager
def on_simulated_rank(rank: int) -> Iterator[None]:
    """Context manager in which code runs as one simulated rank: on ordinary tensors, with the
    random generator of the rank."""
    mode = get_local_tensor_mode_list()[-1]
    with mode.disable():
        states, generator = mode._per_rank_rng_states, torch.default_generator
        before = generator.get_state()
        # The state of a rank is a pair, with the generator of the CPU first.
        generator.set_state(states[rank][0])
        try:
            yield
        finally:
            states[rank] = generator.get_state(), states[rank][1]
            generator.set_state(before)

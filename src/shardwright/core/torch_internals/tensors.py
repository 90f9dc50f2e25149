"""Internals of tensors: storage, version counter and flags; foreach operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

Subclass = TypeVar("Subclass", bound=Tensor)

base_getter = Tensor._base.__get__  # type: ignore[union-attr]
"""The `func` argument that a `TorchFunctionMode` receives for `tensor._base`."""

data_getter = Tensor.data.__get__  # type: ignore[attr-defined]
"""The `func` argument that a `TorchFunctionMode` receives when `tensor.data` is read."""

data_setter = Tensor.data.__set__  # type: ignore[attr-defined]
"""The `func` argument that a `TorchFunctionMode` receives when `tensor.data` is assigned."""


grad_getter = Tensor.grad.__get__  # type: ignore[union-attr]
"""The `func` argument that a `TorchFunctionMode` receives when `tensor.grad` is read."""


@contextmanager
def without_checks_of_fake_tensors() -> Iterator[None]:
    """Context in which `torch._check_tensor_all` passes for fake tensors, which have no values."""
    check: Callable[..., None] = torch._check_tensor_all_with

    def check_real(error_type: type[Exception], cond: Any, message: Any = None) -> None:
        if not isinstance(cond, FakeTensor):
            check(error_type, cond, message)

    # `torch._check_tensor_all` looks this function up in its module in each call.
    with patch.object(torch, "_check_tensor_all_with", check_real):
        yield


class compare_tensors_by_identity(TorchFunctionMode):  # noqa: N801
    """Context manager in which `==` on containers compares tensors by identity, without reading
    values.

    Containers compare items by `is` first, and call `==` for different tensors only, which here
    returns False.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> bool:
        return False


@contextmanager
def copied_results() -> Iterator[None]:
    """Context manager in which `copy.deepcopy` supports non-leaf tensors; copies are leaves."""
    deepcopy = Tensor.__deepcopy__

    def copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if self.is_leaf or id(self) in memo:
            return deepcopy(self, memo)  # type: ignore[no-untyped-call, no-any-return]
        # In the memo, so that a tensor that occurs twice is copied once.
        # A tensor with a node in the autograd graph requires a gradient, and so does its copy.
        memo[id(self)] = result = self.detach().clone().requires_grad_()
        return result

    with patch.object(Tensor, "__deepcopy__", copied):
        yield


def underlying_device(tensor: Tensor) -> torch.device:
    """Return the device of a tensor's storage, even if a subclass overrides `device`."""
    device: torch.device = Tensor.device.__get__(tensor)
    return device


storage_id: Callable[[Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""Return the id of a tensor's storage, also for fake and meta tensors. Ids of freed storages may be
reused."""

requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
"""Return whether a tensor requires a gradient."""

getters_without_overrides = torch._C.DisableTorchFunctionSubclass
"""Context manager that disables `__torch_function__` of tensor subclasses, for faster reads of
attributes of DTensors; the attributes' values do not depend on it."""

version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
"""Return the version counter of a tensor, which each in-place operator increments."""


def as_subclass(tensor_class: type[Subclass], tensor: Tensor) -> Subclass:
    """Return a detached tensor of class `tensor_class` that shares the storage of `tensor`."""
    return torch.Tensor._make_subclass(tensor_class, tensor)


def prioritize_gradient(tensor: Tensor) -> Tensor:
    """Make the backward pass run the autograd node of `tensor` as soon as its gradient is complete.

    The autograd engine runs ready nodes in reverse order of their creation, so a node created early
    waits for all later nodes. The node of `tensor` gets the priority of a leaf. Returns `tensor`.
    """
    # A leaf has no node, and accumulating into it has this priority anyway.
    if tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(2**64 - 1)  # type: ignore[attr-defined]
    return tensor


def runs_in_backward_pass(node: Node) -> bool:
    """Return whether the current backward pass runs `node`; only called during a backward pass."""
    return torch._C._will_engine_execute_node(node)


def conjugated(tensor: Tensor) -> Tensor:
    """Return a lazily conjugated view of a tensor."""
    return torch._conj(tensor)


def negated(tensor: Tensor) -> Tensor:
    """Return a lazily negated view of a tensor."""
    return torch._neg_view(tensor)


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target at the same index, in one kernel where possible."""
    # Foreach operators take a list or a tuple, but no other sequence.
    torch._foreach_copy_(list(targets), list(sources))


def norms_of_each(tensors: Sequence[Tensor], norm_type: float = 2.0) -> tuple[Tensor, ...]:
    """Return the norm of each tensor as a scalar tensor.

    Args:
        tensors: tensors of any shapes.
        norm_type: the order of the norms.
    """
    return tuple(torch._foreach_norm(list(tensors), norm_type))


def scale_all_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by the scalar tensor `factor`, in place."""
    torch._foreach_mul_(list(tensors), factor)

"""What a tensor is under the surface: its storage, version and flags; many tensors in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.overrides import TorchFunctionMode

Subclass = TypeVar("Subclass", bound=Tensor)

base_getter = Tensor._base.__get__  # type: ignore[union-attr]
"""What gives the tensor that a view is of, as `__torch_function__` sees it."""

data_getter = Tensor.data.__get__  # type: ignore[attr-defined]
"""What `tensor.data` calls, as a mode for functions sees it."""

data_setter = Tensor.data.__set__  # type: ignore[attr-defined]
"""What `tensor.data = value` calls, as a mode for functions sees it."""


grad_getter = Tensor.grad.__get__  # type: ignore[union-attr]
"""What `tensor.grad` calls, likewise."""


class tensors_equal_if_same(TorchFunctionMode):  # noqa: N801
    """A context in which containers of tensors are equal if they hold the same ones: Python asks
    `==` only of tensors that are not, and no values are compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> bool:
        return False


def device_below(tensor: Tensor) -> torch.device:
    """The device that a tensor lies on, whatever its subclass says."""
    device: torch.device = Tensor.device.__get__(tensor)
    return device


storage_id: Callable[[Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""The identity of the memory of a tensor, with numbers or without; another storage may get the same
once this one is freed."""

requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
"""Whether a tensor requires a gradient."""

getters_without_overrides = torch._C.DisableTorchFunctionSubclass
"""A context in which getters do not ask the class of a tensor whether it overrides them, which is
most of their time for a DTensor, which overrides none."""

version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
"""How often the tensor was changed in place."""


def as_subclass(kind: type[Subclass], tensor: Tensor) -> Subclass:
    """A tensor of a subclass that shares the memory of `tensor`, apart from its autograd graph."""
    return torch.Tensor._make_subclass(kind, tensor)


def gradient_at_once(tensor: Tensor) -> Tensor:
    """The tensor, whose gradient a backward pass hands on as soon as it is complete, as it does
    that of leaves: else it waits for all that was made after the tensor was."""
    if tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(2**64 - 1)  # type: ignore[attr-defined]
    return tensor


def conjugated(tensor: Tensor) -> Tensor:
    """A view that is conjugated when it is read."""
    return torch._conj(tensor)


def negated(tensor: Tensor) -> Tensor:
    """A view that is negated when it is read."""
    return torch._neg_view(tensor)


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target; one kernel where the device has it."""
    torch._foreach_copy_(list(targets), list(sources))


def each_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The 2-norm of each."""
    return tuple(torch._foreach_norm(list(tensors)))


def scale_all_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies each by `factor`, in place."""
    torch._foreach_mul_(list(tensors), factor)

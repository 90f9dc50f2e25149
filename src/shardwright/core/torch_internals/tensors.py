"""Internals of tensors: storage, version counter, flags; operators on lists of tensors."""

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
from torch.overrides import TorchFunctionMode

Subclass = TypeVar("Subclass", bound=Tensor)

base_getter = Tensor._base.__get__  # type: ignore[union-attr]
"""The getter of `tensor._base`, as a `TorchFunctionMode` receives it."""

data_getter = Tensor.data.__get__  # type: ignore[attr-defined]
"""The getter of `tensor.data`, as a `TorchFunctionMode` receives it."""

data_setter = Tensor.data.__set__  # type: ignore[attr-defined]
"""The setter of `tensor.data`, as a `TorchFunctionMode` receives it."""


grad_getter = Tensor.grad.__get__  # type: ignore[union-attr]
"""The getter of `tensor.grad`, as a `TorchFunctionMode` receives it."""


class compare_tensors_by_identity(TorchFunctionMode):  # noqa: N801
    """Context in which `==` compares tensors by identity, without reading values.

    Containers compare their items by `is` first, so that `==` is called for different tensors only,
    and returns False.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> bool:
        return False


@contextmanager
def copied_results() -> Iterator[None]:
    """Context in which results of operators that require a gradient can be deep-copied.

    The copies have no history: they are leaves.
    """
    deepcopy = Tensor.__deepcopy__

    def copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if self.is_leaf or id(self) in memo:
            return deepcopy(self, memo)  # type: ignore[no-untyped-call, no-any-return]
        memo[id(self)] = result = self.detach().clone().requires_grad_()
        return result

    with patch.object(Tensor, "__deepcopy__", copied):
        yield


def underlying_device(tensor: Tensor) -> torch.device:
    """Return the device of a tensor's storage, even if a subclass overrides `device`."""
    device: torch.device = Tensor.device.__get__(tensor)
    return device


storage_id: Callable[[Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""The identity of a tensor's storage, also of fake and meta tensors. After a storage is freed, its
identity may be reused."""

requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
"""Whether a tensor requires a gradient."""

getters_without_overrides = torch._C.DisableTorchFunctionSubclass
"""Context that disables `__torch_function__` of subclasses, which takes most of the time of a
DTensor's getters, although DTensor overrides none of them."""

version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
"""The version counter of a tensor: the number of its in-place changes."""


def as_subclass(tensor_class: type[Subclass], tensor: Tensor) -> Subclass:
    """Make a detached tensor of a subclass that shares the storage of `tensor`."""
    return torch.Tensor._make_subclass(tensor_class, tensor)


def prioritize_gradient(tensor: Tensor) -> Tensor:
    """Let the backward pass propagate the gradient of `tensor` as soon as it is complete.

    The engine runs ready nodes by descending sequence number, which is their order of creation, so
    that the node of an early tensor waits for all later nodes. This gives the node of `tensor` the
    highest number, which leaves have.
    """
    if tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(2**64 - 1)  # type: ignore[attr-defined]
    return tensor


def conjugated(tensor: Tensor) -> Tensor:
    """Return a lazily conjugated view of a tensor."""
    return torch._conj(tensor)


def negated(tensor: Tensor) -> Tensor:
    """Return a lazily negated view of a tensor."""
    return torch._neg_view(tensor)


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place; in one kernel if the device supports it."""
    torch._foreach_copy_(list(targets), list(sources))


def norms_of_each(tensors: Sequence[Tensor], norm_type: float = 2.0) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, as scalar tensors."""
    return tuple(torch._foreach_norm(list(tensors), norm_type))


def scale_all_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by the scalar tensor `factor`, in place."""
    torch._foreach_mul_(list(tensors), factor)

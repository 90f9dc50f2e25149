"""Materialize the deferred parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwright.core.deferred.tensor import Deferred, value_of, values_of
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.modules import forget_flat_weights, restore_flat_weights


def materialize(module: nn.Module) -> nn.Module:
    """Initialize every tensor of `module` that was created inside `no_init_parameters`.

    Values are computed on the CPU. Parameters stay the same objects, so an optimizer that refers to
    them remains valid, and tied parameters stay tied.

    Returns:
        `module`.

    Raises:
        DeferredError: if a tensor depends on a meta tensor that was never initialized, or on data
            that has been modified.
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    # `swap_tensors` rejects weights with weak references, which recurrent modules hold.
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    for child in recurrent:
        forget_flat_weights(child)
    for name, value in values_of(tensors, lambda name, tensor: tensor.clone()).items():
        _replace_tensor_contents(tensors[name], value)
    materialize_attributes(module)
    for child in recurrent:
        restore_flat_weights(child)
    return module


def materialize_attributes(module: nn.Module) -> None:
    """Initialize, in place, deferred tensors in plain attributes of `module` and its submodules."""
    for tensor in list(deferred_attributes(module)):
        _replace_tensor_contents(tensor, value_of(tensor))


def deferred_attributes(module: nn.Module) -> Iterator[Deferred]:
    """Yield deferred tensors in attributes of `module` and its submodules that are neither
    parameters nor buffers."""
    return (
        tensor for tensor in _iterate_deferred_attributes(module) if isinstance(tensor, Deferred)
    )


def copies_of_attributes(module: nn.Module) -> dict[int, Tensor]:
    """Return a `copy.deepcopy` memo with the tensors in plain attributes of modules.

    Ordinary tensors are shared by detached tensors, as `deepcopy` rejects tensors that are not
    leaves. Deferred tensors are replaced by their values.
    """
    return {
        id(tensor): value_of(tensor) if isinstance(tensor, Deferred) else tensor.detach()
        for tensor in _iterate_deferred_attributes(module)
    }


def _iterate_deferred_attributes(module: nn.Module) -> Iterator[Tensor]:
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for child in module.modules():
        # This includes the registries of the module, whose tensors are left out by id.
        for leaf in pytree.tree_leaves(list(vars(child).values())):
            if isinstance(leaf, Tensor) and id(leaf) not in registered:
                yield leaf


def _replace_tensor_contents(tensor: Tensor, value: Tensor) -> None:
    """Make the object `tensor` have the class, memory and values of `value`."""
    # An assignment to `tensor.data` can change neither the class nor the type of device.
    if isinstance(tensor, nn.Parameter):
        # `swap_tensors` also swaps the class, which for a parameter must stay `nn.Parameter`.
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]

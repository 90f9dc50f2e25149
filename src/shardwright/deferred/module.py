"""Models whose parameters are deferred."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwright.deferred.tensor import Deferred, value_of, values_of
from shardwright.torch_internals import pytree
from shardwright.torch_internals.modules import forget_flat_weights, restore_flat_weights


def materialize(module: nn.Module) -> nn.Module:
    """Gives every tensor of `module` that was made inside `no_init_parameters` its values, in
    place, on the CPU; returns `module`.

    Parameters stay the objects that they are, so an optimizer that holds them goes on with them;
    tied ones stay tied.

    Raises:
        DeferredError: if one is made from a tensor that never had values.
    """
    found: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    attributes = list(deferred_attributes(module))
    for child in recurrent:
        forget_flat_weights(child)
    for name, made in values_of(found, lambda name, whole: whole.clone()).items():
        _become(found[name], made)
    for tensor in attributes:
        _become(tensor, value_of(tensor))
    for child in recurrent:
        restore_flat_weights(child)
    return module


def deferred_attributes(module: nn.Module) -> Iterator[Deferred]:
    """The deferred tensors that modules keep as plain attributes, neither parameters nor
    buffers."""
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for child in module.modules():
        for leaf in pytree.tree_leaves(list(vars(child).values())):
            if isinstance(leaf, Deferred) and id(leaf) not in registered:
                yield leaf


def _become(tensor: Tensor, made: Tensor) -> None:
    """Makes the object `tensor` what `made` is."""
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]

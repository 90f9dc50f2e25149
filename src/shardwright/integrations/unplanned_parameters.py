"""Parameters of a user's module outside of its planned models, in loops of other libraries.

A planned model takes the values of rank 0, and averages its gradients over local batches. A module
that is used otherwise than by a call, for example by a method `net.loss(x)`, is not planned.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwright.core.agreement.collective import (
    check_description,
    has_other_ranks,
    take_values_of_rank_0,
)
from shardwright.core.deferred import Deferred
from shardwright.core.parallel.module import ParallelModule
from shardwright.errors import PlanError
from shardwright.integrations.rank_data import DataShards


def take_unplanned_tensors_of_rank_0(net: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers outside of planned models the values of rank 0. Collective.

    Args:
        net: the user's module.
        device: device for collectives.

    Raises:
        PlanError: if these tensors differ between ranks in name, dtype or shape.
    """
    if not has_other_ranks():
        return
    planned = {
        id(tensor)
        for module in net.modules()
        if isinstance(module, ParallelModule)
        for tensor in (*module.parameters(), *module.buffers())
    }
    tensors = {
        name: tensor
        for name, tensor in (*net.named_parameters(), *net.named_buffers())
        # Tensors without values get them when the model is planned.
        if not (
            id(tensor) in planned
            or isinstance(tensor, Deferred | DTensor)
            or is_lazy(tensor)
            or tensor.is_meta
        )
    }
    lines = [f"{name}: {t.dtype} of shape {tuple(t.shape)}" for name, t in tensors.items()]
    check_description(lines, device)
    take_values_of_rank_0(tensors, device)


def check_gradients(nets: Iterable[nn.Module], shards: DataShards) -> None:
    """Check that local batches gave gradients only to planned parameters.

    PyTorch's backward pass does not average gradients over data shards, so that parameters outside
    of planned models would differ between ranks after a step.

    Args:
        nets: the user's modules.
        shards: the division of a batch over the ranks.

    Raises:
        PlanError: if a parameter outside of the planned models has a gradient.
    """
    # Under global batches every rank computes the gradients of all samples.
    if shards.count == 1:
        return
    for net in nets:
        for name, parameter in net.named_parameters():
            if parameter.grad is None or isinstance(parameter, DTensor):
                continue
            raise PlanError(
                f"parameter {name!r} of {type(net).__name__} has a gradient of this rank's samples"
                " only, since it is used outside of a planned model\ncall the model itself"
                " (`net(x)`), which plans it, instead of its methods, submodules or parameters, or"
                " use global batches (`dataset_strategy='full_batch'`)"
            )

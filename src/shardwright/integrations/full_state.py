"""Full, unsharded state dicts of planned models and their optimizers, gathered on rank 0."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.core.agreement.collective import is_rank_0
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.whole import whole
from shardwright.core.torch_internals import pytree
from shardwright.integrations.stage_optimizers import (
    gather_stages,
    has_stages_on_any_rank,
    select_stage,
)


def full_model_state(net: nn.Module) -> OrderedDict[str, Any]:
    """Gather the full `state_dict` of a model on the CPU of rank 0; empty on other ranks.

    Collective. The planned module may be `net` itself or any of its submodules.
    """
    state: dict[str, Any] = {}
    planned = {
        path: module for path, module in net.named_modules() if isinstance(module, ParallelModule)
    }
    # Ordinary parameters beside planned submodules are equal on all ranks. Hooks of the model's own
    # `state_dict`, which may add or rename entries, run on all ranks.
    own_state = net.state_dict()
    for path, module in planned.items():
        prefix = f"{path}." if path else ""
        with whole(module, rank0_only=True, device="cpu") as original:
            state |= {prefix + name: value for name, value in original.state_dict().items()}
    if not is_rank_0():
        return OrderedDict()
    # Tied tensors share memory in the result too, so that formats without ties save them once.
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Views of one memory, such as a matrix and its transpose, may differ in strides only.
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        return copies.setdefault(key, value.detach().cpu().clone())

    # Entries of either, with the full tensor where the module's own state has a shard.
    return OrderedDict(
        (name, copied(state.get(name, value))) for name, value in (state | own_state).items()
    )


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Gather the full `state_dict` of an optimizer on the CPU of rank 0.

    Collective. Other ranks get a `state_dict` with None in place of each tensor.
    """
    if has_stages_on_any_rank(optimizer):
        return gather_stages(optimizer)
    state: dict[str, Any] = pytree.tree_map(gather_on_rank_0, optimizer.state_dict())
    return state


def load_full_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the full `state_dict` of an optimizer, as of a run on one process. Collective."""
    in_stages = has_stages_on_any_rank(optimizer)
    optimizer.load_state_dict(select_stage(optimizer, state) if in_stages else state)


def gather_on_rank_0(value: Any) -> Any:
    """Gather a DTensor to the CPU of rank 0; other ranks free the full tensor and get None."""
    # On every rank, as gathering a DTensor is collective.
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if not is_rank_0():
        return None
    return full.cpu() if isinstance(full, Tensor) else full


def has_stages(net: nn.Module) -> bool:
    """Whether a planned module of `net` has several pipeline stages."""
    return any(
        isinstance(module, ParallelModule) and module.execution.devices.stages > 1
        for module in net.modules()
    )

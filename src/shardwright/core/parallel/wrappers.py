"""Reject wrappers of PyTorch around planned models, before they communicate or change parameters.

A planned model shards its parameters and reduces its gradients itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import style
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright.core.parallel.execution import Execution
from shardwright.core.runtime.accelerator import num_accelerators
from shardwright.core.runtime.adopt_optimizer import is_planned_parameter
from shardwright.core.torch_internals.distributed import before_replicate, names_ignored_by_ddp
from shardwright.core.torch_internals.modules import call_before
from shardwright.errors import PlanError

FRAMEWORKS = (
    "under Accelerate prepare the model with"
    " `shardwright.integrations.accelerate.prepare(accelerator, net, optimizer, loader)`, under"
    " Lightning pass `strategy=ShardwrightStrategy()` of `shardwright.integrations.lightning`"
)


def refuse_wrappers() -> None:
    """Make PyTorch's wrappers raise `PlanError` for planned models.

    The change applies to this process; further calls do nothing.
    """
    call_before(DistributedDataParallel, "__init__", _check_ddp)
    call_before(FullyShardedDataParallel, "__init__", _check_fsdp)
    call_before(DataParallel, "__init__", _check_data_parallel)
    # Called by `parallelize_module`, which users may have imported before.
    call_before(style, "distribute_module", _check_parallelize_module)
    before_replicate(_check_replicate)


def _check_ddp(_: object, module: nn.Module, *args: Any, **options: Any) -> None:
    names = names_ignored_by_ddp(module)
    tensors = chain(module.named_parameters(), module.named_buffers())
    ignored = [tensor for name, tensor in tensors if name in names]
    _refuse_planned(module, "DistributedDataParallel", ignored)


def _check_replicate(module: nn.Module, ignored_modules: Iterable[nn.Module]) -> None:
    ignored = chain.from_iterable(m.parameters() for m in ignored_modules)
    _refuse_planned(module, "`replicate`", ignored, reads_buffers=False)


def _check_fsdp(
    _: object,
    module: nn.Module,
    *args: Any,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Module | Tensor] | None = None,
    **options: Any,
) -> None:
    ignored: list[Tensor] = []
    for state in (*(ignored_modules or ()), *(ignored_states or ())):
        ignored += state.parameters() if isinstance(state, nn.Module) else [state]
    # On one device too, as its flat parameter would replace the planned ones.
    _refuse_planned(
        module, "FullyShardedDataParallel", ignored, reads_buffers=False, allows_one_device=False
    )


def _check_data_parallel(
    _: object, module: nn.Module, device_ids: Any = None, *args: Any, **options: Any
) -> None:
    count = num_accelerators() if device_ids is None else len(device_ids)
    # For one device it only calls the module.
    if count > 1:
        _refuse_planned(module, "DataParallel", allows_one_device=False)


def _refuse_planned(
    module: nn.Module,
    wrapper: str,
    ignored: Iterable[Tensor] = (),
    *,
    reads_buffers: bool = True,
    allows_one_device: bool = True,
) -> None:
    """Raise an error if a planned model in `module` has tensors that a wrapper would manage.

    Args:
        module: the module that is wrapped.
        wrapper: name of the wrapper.
        ignored: the tensors that the wrapper ignores.
        reads_buffers: whether the wrapper manages buffers too.
        allows_one_device: whether models that are planned for one device are allowed.
    """
    ignored_ids = set(map(id, ignored))
    for path, planned in module.named_modules():
        # A planned model refers to its execution.
        execution = vars(planned).get("execution")
        if not isinstance(execution, Execution):
            continue
        if allows_one_device and not execution.devices.is_distributed:
            continue
        tensors = chain(planned.parameters(), planned.buffers() if reads_buffers else ())
        if all(id(tensor) in ignored_ids for tensor in tensors):
            continue
        where = f" ({path!r})" if path else ""
        raise PlanError(
            f"{wrapper} wraps the planned {type(planned).__name__}{where}, which shards its"
            " parameters and reduces its gradients itself\ncall the model without it; to shard"
            " parameters over replicas, plan with `sw.plan(net, batch, devices=8,"
            f" hsdp={{'level': 'level3'}})`; {FRAMEWORKS}"
        )


def _check_parallelize_module(module: nn.Module, *args: Any, **options: Any) -> None:
    for name, parameter in module.named_parameters():
        if is_planned_parameter(parameter):
            raise PlanError(
                f"`parallelize_module` was called on a planned model, whose parameter {name!r} of"
                f" shape {tuple(parameter.shape)} is sharded already\nremove `parallelize_module`;"
                " to choose how a module is sharded, mark it before planning:"
                " `net.up = sw.shard(net.up, ((2, 4), (1, 4)))`"
            )

"""Models that `parallelize` cannot take, as something has distributed them already."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.errors import PlanError

EXAMPLE = "net = sw.parallelize(net, sw.plan(net, batch, devices=8))"

WRAPPERS = {
    DistributedDataParallel: "wrapped by DistributedDataParallel",
    DataParallel: "wrapped by DataParallel",
    FullyShardedDataParallel: "wrapped by FullyShardedDataParallel",
    FSDPModule: "sharded by fully_shard",
}


def check_not_planned(net: object) -> None:
    """Raises:
    PlanError: if `net`, or a module inside of it, is planned already.
    """
    modules = wrapped_model(net).named_modules() if isinstance(net, nn.Module) else ()
    for path, module in modules:
        if isinstance(module, ParallelModule):
            raise PlanError(
                f"{_where(path, module)} is planned already, and `parallelize` works in place\n"
                f"plan the whole model, once: {EXAMPLE}\n"
                "keep the original, to plan or check it again: parallelize(net, plan, copy=True)"
            )


def check_not_distributed(net: nn.Module) -> None:
    """Raises:
    PlanError: if `net`, or a module inside of it, is planned, wrapped or sharded already.
    """
    check_not_planned(net)
    for path, module in wrapped_model(net).named_modules():
        where = _where(path, module)
        for wrapper, what in WRAPPERS.items():
            if isinstance(module, wrapper):
                raise PlanError(
                    f"{where} is {what} already, and `parallelize` distributes it itself\n"
                    f"give it the model as it was before: {EXAMPLE}"
                )
    for name, parameter in net.named_parameters():
        if isinstance(parameter, DTensor):
            raise PlanError(
                f"parameter {name!r} is a DTensor already, as `parallelize_module` makes them, and "
                f"`parallelize` shards it itself\ngive it the model as it was before: {EXAMPLE}"
            )


def _where(path: str, module: nn.Module) -> str:
    return f"module {path!r} of the model" if path else f"the {type(module).__name__}"

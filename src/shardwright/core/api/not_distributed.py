"""Reject models that are planned, wrapped or sharded already."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.runtime.adopt_optimizer import is_planned_parameter
from shardwright.core.torch_internals.distributed import ReplicatedModule
from shardwright.errors import PlanError

EXAMPLE = "net = sw.parallelize(net, sw.plan(net, batch, devices=8))"

DISTRIBUTED_CLASSES = {
    DistributedDataParallel: "wrapped by DistributedDataParallel",
    DataParallel: "wrapped by DataParallel",
    FullyShardedDataParallel: "wrapped by FullyShardedDataParallel",
    FSDPModule: "sharded by fully_shard",
    ReplicatedModule: "wrapped by `replicate`",
}


def check_not_planned(net: object) -> None:
    """Check that neither `net` nor a submodule is planned already.

    Raises:
        PlanError: for the first planned module.
    """
    modules = wrapped_model(net).named_modules() if isinstance(net, nn.Module) else ()
    for path, module in modules:
        if isinstance(module, ParallelModule):
            raise PlanError(
                f"{_describe_module(path, module)} is planned already: `sw.parallelize` changes "
                f"models in place\nplan the outermost model once: `{EXAMPLE}`; to plan or check a "
                "model again, parallelize a copy: `sw.parallelize(net, plan, copy=True)`"
            )


def check_not_distributed(net: nn.Module) -> None:
    """Check that neither `net` nor a submodule is planned, wrapped (DDP, FSDP) or sharded already.

    Raises:
        PlanError: for the first module or parameter that is planned, wrapped or sharded.
    """
    check_not_planned(net)
    # Submodules too, as FSDP is often applied to each block.
    for path, module in wrapped_model(net).named_modules():
        # Not the class of the outermost module, which is that of the wrapper.
        where = f"module {path!r} of the model" if path else "the model"
        for distributed_class, how in DISTRIBUTED_CLASSES.items():
            if isinstance(module, distributed_class):
                raise PlanError(
                    f"{where} is {how} already, but `sw.parallelize` distributes models itself\n"
                    f"pass the original model: `{EXAMPLE}`"
                )
    # `parallelize_module` changes parameters, but not the classes of modules.
    for name, parameter in net.named_parameters():
        if isinstance(parameter, DTensor):
            if is_planned_parameter(parameter):
                raise PlanError(
                    f"parameter {name!r} is in another planned model too, whose plan shards it\n"
                    "plan one module that calls both models, or copy the submodule that they share"
                    " (`copy.deepcopy`) before the first `sw.parallelize`"
                )
            raise PlanError(
                f"parameter {name!r} is a DTensor already (as from `parallelize_module`), but "
                f"`sw.parallelize` shards parameters itself\n"
                f"pass the model without DTensors: `{EXAMPLE}`"
            )


def _describe_module(path: str, module: nn.Module) -> str:
    return f"module {path!r} of the model" if path else f"the {type(module).__name__}"

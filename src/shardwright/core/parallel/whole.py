"""Turn a planned model into the original with full parameters for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.misuse.calls_of_parts import explain_calls_of_parts, leave_calls_of_parts
from shardwright.core.parallel.execution import Execution
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.torch_internals.dtensor import local_part_of
from shardwright.core.torch_internals.hooks import add_forward_hooks, swap_forward_hooks
from shardwright.core.torch_internals.tensors import version
from shardwright.errors import PlanError


@contextmanager
def whole(
    net: nn.Module, *, rank0_only: bool = False, device: str | torch.device | None = None
) -> Iterator[nn.Module]:
    """Context in which `net` is an eager instance of the user's class with full parameters.

    Use it to generate, to save, or to inspect the model. The shards are restored at the end.

    Collective: the parameters of all stages are gathered, one after another. Writes to parameters
    under `torch.no_grad()` are kept, so every rank must write the same. A module that is not
    planned is left as it is.

    Args:
        net: a planned model, or an `AutoParallel`.
        rank0_only: whether only rank 0 gets the values, to save memory. Other ranks have parameters
            on the meta device, and writes are refused.
        device: device of the full parameters; by default the device of the model.

    Yields:
        `net` itself, or the model inside of an `AutoParallel`.

    Raises:
        PlanError: for a backward pass inside, a parameter that is replaced inside, or one that is
            written with `rank0_only`.
    """
    if not isinstance(net, nn.Module):
        raise PlanError(f"whole() takes what `parallelize` returned, not {net!r}")
    net = wrapped_model(net)
    if not isinstance(net, ParallelModule):
        yield net
        return
    execution, kind = net.execution, type(net)
    execution.take_values()
    parameters = _gathered(execution, device, not rank0_only or _is_rank_0())
    shards = [(name, detached_local(parameter)) for name, parameter in net.named_parameters()]
    shard_versions = [version(shard) for _, shard in shards]
    with ExitStack() as undo:
        _put(net, execution, parameters, undo)
        _be_original(net, execution, undo)
        undo.callback(object.__setattr__, net, "__class__", kind)
        object.__setattr__(net, "__class__", kind.__bases__[-1])
        versions = {name: version(tensor) for name, tensor in parameters.items()}
        yield net
        for name, parameter in parameters.items():
            if net.get_parameter(name) is not parameter:
                raise PlanError(
                    f"{name!r} was replaced inside of `shardwright.whole`, which would have no "
                    "effect: copy into it under `torch.no_grad()`, or replace it before `plan`"
                )
    for (name, shard), before in zip(shards, shard_versions, strict=True):
        if version(shard) != before:
            raise PlanError(
                f"an optimizer changed {name!r} inside of `shardwright.whole`, where the model has "
                "copies of its parameters: call `step` outside"
            )
    for name, held in net.named_parameters():
        if rank0_only and version(parameters[name]) != versions[name]:
            raise PlanError(
                f"{name!r} was written inside of `whole(net, rank0_only=True)`, where other ranks "
                "do not have it: leave out `rank0_only`, and write the same on every rank"
            )
        if not rank0_only:
            mine, written = detached_local(held), local_part_of(parameters[name].detach(), held)
            # Compare values: writes through `.data` do not change the version counter.
            if not torch.equal(written.to(mine.device), mine):
                mine.copy_(written)


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gathered(
    execution: Execution, device: str | torch.device | None, has_values: bool
) -> dict[str, nn.Parameter]:
    """Gather the parameters of all stages, by name; on the meta device without `has_values`."""
    held, devices = dict(execution.module.named_parameters()), execution.devices
    where = torch.device(device) if device is not None else devices.device
    result = {}
    for name, planned in execution.template.named_parameters():
        mine = held.get(name)
        tensor = _from_stage(execution, name, planned, mine)
        tensor = tensor.to(where, copy=True) if has_values else torch.empty_like(planned)
        trained = planned.requires_grad if mine is None else mine.requires_grad
        result[name] = nn.Parameter(tensor, requires_grad=trained)
    return result


def _from_stage(execution: Execution, name: str, planned: Tensor, mine: Tensor | None) -> Tensor:
    """Gather a tensor in its stage; the first stage that owns it broadcasts it to the others."""
    devices = execution.devices
    tensor = mine.detach() if mine is not None else None
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if devices.stages > 1:
        if tensor is None:
            tensor = torch.empty(planned.shape, dtype=planned.dtype, device=devices.device)
        tensor = tensor.contiguous()
        source = execution.partitioned.first_stages.get(name, 0)
        dist.broadcast(tensor, group=devices.peers_of_all_stages, group_src=source)
    assert tensor is not None
    return tensor


def _put(
    net: nn.Module, execution: Execution, parameters: dict[str, nn.Parameter], undo: ExitStack
) -> None:
    """Replace the shards in `net` by full parameters, and add the buffers of other stages."""
    template = execution.template
    first = {id(parameter): name for name, parameter in template.named_parameters()}
    for name, planned in template.named_parameters(remove_duplicate=False):
        _set(net, name, parameters[first[id(planned)]], undo)
    held = dict(net.named_buffers())
    for name, planned_buffer in template.named_buffers():
        if execution.devices.stages > 1:
            whole_buffer = _from_stage(execution, name, planned_buffer, held.get(name))
            if name not in held:
                _set(net, name, whole_buffer, undo)


def _set(net: nn.Module, name: str, tensor: Tensor, undo: ExitStack) -> None:
    path, _, leaf = name.rpartition(".")
    owner = net.get_submodule(path)
    undo.callback(setattr, owner, leaf, getattr(owner, leaf))
    setattr(owner, leaf, tensor)


def _be_original(net: nn.Module, execution: Execution, undo: ExitStack) -> None:
    """Restore the hooks and `forward` that the programs contain, and refuse training."""
    own = nn.Module()
    swap_forward_hooks(net, own)
    undo.callback(swap_forward_hooks, net, own)
    execution.forget_removed_hooks()
    add_forward_hooks(net, execution.inside)
    add_forward_hooks(net, own)
    attributes: dict[str, Any] = {"train_step": _refuse, "clip_grad_norm_": _refuse}
    attributes |= {n: f for n, f in vars(execution.inside).items() if n == "forward"}
    for name, value in attributes.items():
        vars(net)[name] = value
        undo.callback(vars(net).pop, name)
    leave_calls_of_parts(net)
    undo.callback(explain_calls_of_parts, net)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise PlanError(
        "a model cannot be trained inside of `shardwright.whole`, where its parameters are copies "
        "that no optimizer has\ntrain it outside"
    )

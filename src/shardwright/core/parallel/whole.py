"""A context in which a planned model is the original module with full parameters."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.misuse.calls_of_parts import explain_calls_of_parts, leave_calls_of_parts
from shardwright.core.parallel.execution import Execution
from shardwright.core.parallel.module import ParallelModule, refuse_training, user_class_of
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.parallel.stages_of_tensors import (
    explain_tensors_of_other_stages,
    leave_tensors_of_other_stages,
)
from shardwright.core.runtime.counted_calls import collective_call
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.runtime.sent_dtypes import broadcast
from shardwright.core.torch_internals.dtensor import local_part_of
from shardwright.core.torch_internals.hooks import add_forward_hooks, swap_forward_hooks
from shardwright.core.torch_internals.tensors import version
from shardwright.errors import PlanError


@contextmanager
def whole(
    net: nn.Module, *, rank0_only: bool = False, device: str | torch.device | None = None
) -> Iterator[nn.Module]:
    """Context in which `net` is an eager instance of the user's class with full parameters.

    Use the context to generate, save, or inspect the model. The shards are restored at its end, as
    with FSDP's `summon_full_params`.

    Collective: the parameters of all stages are gathered, one after another. Writes to parameters
    under `torch.no_grad()` are copied to the shards, so every rank must write the same values. A
    module that is not planned is yielded unchanged.

    Args:
        net: a planned model, or an `AutoParallel`.
        rank0_only: whether only rank 0 gets the values, to save memory. Parameters of other ranks
            are on the meta device, and writes raise an error.
        device: device of the full parameters; by default the device of the model.

    Yields:
        `net` itself, or the model inside an `AutoParallel`.

    Raises:
        PlanError: if a backward pass or an optimizer step runs in the context, a parameter is
            replaced there, or a parameter is written with `rank0_only`.
    """
    if not isinstance(net, nn.Module):
        raise PlanError(
            f"`sw.whole` was called with {net!r}, which is not a module\n"
            "pass the planned model: `net = sw.parallelize(net, plan)`, `with sw.whole(net):`"
        )
    net = wrapped_model(net)
    if not isinstance(net, ParallelModule):
        yield net
        return
    execution, parallel_class = net.execution, type(net)
    with collective_call("whole", execution.devices):
        execution.complete_initialization()
        parameters = _gather_parameters_of_all_stages(
            execution, device, not rank0_only or _is_rank_0()
        )
    # Before the context, in which `net` has the full parameters.
    shards = [(name, detached_local(parameter)) for name, parameter in net.named_parameters()]
    shard_versions = [version(shard) for _, shard in shards]
    with ExitStack() as undo:
        _replace_shards(net, execution, parameters, undo)
        _restore_original_module(net, execution, undo)
        # `ExitStack` undoes in reverse, also after an error: the class first, the parameters last.
        undo.callback(object.__setattr__, net, "__class__", parallel_class)
        # An execution refers to process groups, which cannot be pickled.
        undo.callback(vars(net).__setitem__, "execution", vars(net).pop("execution"))
        object.__setattr__(net, "__class__", user_class_of(parallel_class))
        for module_class in {type(module) for module in net.modules()}:
            _reduce_as_original(module_class, undo)
        versions = {name: version(tensor) for name, tensor in parameters.items()}
        yield net
        for name, parameter in parameters.items():
            if net.get_parameter(name) is not parameter:
                raise PlanError(
                    f"parameter {name!r} was replaced inside `sw.whole`, which has no effect\n"
                    "copy the new values into the parameter under `torch.no_grad()`, or replace it "
                    "before `sw.plan`"
                )
    # The model did not refer to its shards in the context, but an optimizer did.
    for (name, shard), planned_version in zip(shards, shard_versions, strict=True):
        if version(shard) != planned_version:
            raise PlanError(
                f"an optimizer changed parameter {name!r} inside `sw.whole`, where the model has "
                "copies of its parameters\ncall `optimizer.step()` outside `sw.whole`"
            )
    for name, parameter in net.named_parameters():
        # Other ranks have no values, so a write on rank 0 could reach only its own shard.
        if rank0_only and version(parameters[name]) != versions[name]:
            raise PlanError(
                f"parameter {name!r} was written inside `sw.whole(net, rank0_only=True)`, where "
                "only rank 0 has values\nwrite the same values on every rank inside "
                "`sw.whole(net)`"
            )
        if not rank0_only:
            local, written_local = (
                detached_local(parameter),
                local_part_of(parameters[name].detach(), parameter),
            )
            # Compare values: writes through `.data` do not change the version counter.
            if not torch.equal(written_local.to(local.device), local):
                local.copy_(written_local)


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gather_parameters_of_all_stages(
    execution: Execution, device: str | torch.device | None, has_values: bool
) -> dict[str, nn.Parameter]:
    """Gather the parameters of all stages, by name. Collective.

    Args:
        execution: the execution of the planned model.
        device: device of the full parameters; by default the device of the model.
        has_values: whether this rank gets the full data; otherwise it gets meta tensors.
    """
    owned, devices = dict(execution.module.named_parameters()), execution.devices
    target_device = torch.device(device) if device is not None else devices.device
    result = {}
    # The template has the parameters of all stages, in one order on all ranks.
    for name, planned in execution.template.named_parameters():
        owned_parameter = owned.get(name)
        tensor = _gather_tensor_from_owning_stage(execution, name, planned, owned_parameter)
        tensor = tensor.to(target_device, copy=True) if has_values else torch.empty_like(planned)
        # The user may have frozen a parameter since planning; of other stages only the plan's state
        # is known.
        trained = (
            planned.requires_grad if owned_parameter is None else owned_parameter.requires_grad
        )
        result[name] = nn.Parameter(tensor, requires_grad=trained)
    return result


def _gather_tensor_from_owning_stage(
    execution: Execution, name: str, planned: Tensor, owned: Tensor | None
) -> Tensor:
    """Gather a tensor within its stage, and broadcast it from the first stage that owns it.

    Args:
        execution: the execution of the planned model.
        name: name of the parameter or buffer.
        planned: the full tensor of the template, on the meta device.
        owned: this rank's tensor; None if this rank's stage does not own it.
    """
    devices = execution.devices
    tensor = owned.detach() if owned is not None else None
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if devices.stages > 1:
        if tensor is None:
            tensor = torch.empty(planned.shape, dtype=planned.dtype, device=devices.device)
        # Broadcasts write into contiguous memory.
        tensor = tensor.contiguous()
        source = min(execution.stages_of_tensors[name])
        broadcast(tensor, devices.peers_of_all_stages, source)
    assert tensor is not None
    return tensor


def _replace_shards(
    net: nn.Module, execution: Execution, parameters: dict[str, nn.Parameter], undo: ExitStack
) -> None:
    """Replace the shards of `net` by full parameters, and add the buffers of other stages."""
    template = execution.template
    if leave_tensors_of_other_stages(net):
        undo.callback(explain_tensors_of_other_stages, net, template)
    # Tied parameters are gathered once, under their first name.
    first_names = {id(parameter): name for name, parameter in template.named_parameters()}
    for name, planned in template.named_parameters(remove_duplicate=False):
        _replace_tensor_temporarily(net, name, parameters[first_names[id(planned)]], undo)
    # One stage has all buffers in full already.
    if execution.devices.stages > 1:
        _add_buffers_of_other_stages(net, execution, undo)


def _add_buffers_of_other_stages(net: nn.Module, execution: Execution, undo: ExitStack) -> None:
    owned = dict(net.named_buffers(remove_duplicate=False))
    names_of_buffer: dict[Tensor, list[str]] = {}
    for name, planned in execution.template.named_buffers(remove_duplicate=False):
        names_of_buffer.setdefault(planned, []).append(name)
    for planned, names in names_of_buffer.items():
        owned_buffer = next((owned[name] for name in names if name in owned), None)
        # Gathered once under the first name, so that all names refer to one tensor.
        full = _gather_tensor_from_owning_stage(
            execution, names[0], planned, owned.get(names[0], owned_buffer)
        )
        for name in names:
            if name not in owned:
                tensor = owned_buffer if owned_buffer is not None else full
                _replace_tensor_temporarily(net, name, tensor, undo)


def _replace_tensor_temporarily(net: nn.Module, name: str, tensor: Tensor, undo: ExitStack) -> None:
    path, _, leaf = name.rpartition(".")
    owner = net.get_submodule(path)
    # Also None, in place of a tensor of another stage, is restored.
    undo.callback(setattr, owner, leaf, getattr(owner, leaf))
    setattr(owner, leaf, tensor)


def _restore_original_module(net: nn.Module, execution: Execution, undo: ExitStack) -> None:
    """Restore hooks and `forward` that programs contain, and make all training of `net` an
    error."""
    later_hooks = nn.Module()
    swap_forward_hooks(net, later_hooks)
    undo.callback(swap_forward_hooks, net, later_hooks)
    execution.forget_removed_hooks()
    # Hooks that the program contains come first, in the order in which they were registered.
    add_forward_hooks(net, execution.captured_hooks)
    add_forward_hooks(net, later_hooks)
    attributes: dict[str, Any] = {
        "train_step": refuse_training,
        "clip_grad_norm_": refuse_training,
    }
    attributes |= {n: f for n, f in vars(execution.captured_hooks).items() if n == "forward"}
    for name, value in attributes.items():
        vars(net)[name] = value
        undo.callback(vars(net).pop, name)
    if execution.partitioned.graph.python is None:
        leave_calls_of_parts(net)
        undo.callback(explain_calls_of_parts, net)
    for parameter in net.parameters():
        if parameter.requires_grad:
            # Gradients of the copies would be lost at the end of the context.
            parameter.register_hook(refuse_training)  # type: ignore[no-untyped-call]


STATE_DICT_HOOKS = {name for name in vars(nn.Module()) if "state_dict" in name}
"""Attributes of a module with the hooks of `state_dict` and `load_state_dict`."""


def _reduce_as_original(module_class: type[nn.Module], undo: ExitStack) -> None:
    """Make pickles and copies of instances the same as in a model that was never planned, so that
    `torch.load` reads them where Shardwright is not installed."""
    # Not by a method of the instances, as shallow copies would have it too.
    table: dict[type, Any] = copyreg.dispatch_table
    earlier = table.get(module_class)

    def reduce(module: nn.Module) -> Any:
        reduced = earlier(module) if earlier is not None else module.__reduce_ex__(2)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            # The class chooses by itself what is pickled.
            return reduced
        state = {name: value for name, value in reduced[2].items() if value is not refuse_training}
        for name in STATE_DICT_HOOKS & state.keys():
            hooks = state[name].items()
            state[name] = type(state[name])((k, hook) for k, hook in hooks if not _is_ours(hook))
        return *reduced[:2], state, *reduced[3:]

    table[module_class] = reduce
    if earlier is not None:
        undo.callback(table.__setitem__, module_class, earlier)
    else:
        undo.callback(table.pop, module_class)


def _is_ours(hook: Any) -> bool:
    """Whether a hook of a module is not the user's but one of planned models."""
    # PyTorch wraps hooks that take the module.
    function = getattr(hook, "hook", hook)
    function = function.func if isinstance(function, partial) else function
    return (getattr(function, "__module__", None) or "").startswith("shardwright.")

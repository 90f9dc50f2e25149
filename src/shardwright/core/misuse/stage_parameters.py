"""Reject norms and optimizers that would combine the parameters of one pipeline stage only.

A rank has the parameters of its own stage, so their norm is not that of the model. Clipping by the
norm of one stage would scale the gradients of each stage by a different factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.misuse.caller import user_line
from shardwright.core.misuse.partial_state import mark_stage_state
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.torch_internals.norms import before_norms
from shardwright.core.torch_internals.tensors import storage_id
from shardwright.errors import PlanError


class StageParameters(NamedTuple):
    """The parameters of this rank's stage of a planned model.

    Args:
        parameters: the parameters that this rank owns.
        elsewhere: names of the parameters that other stages own, including parameters tied across
            stages; all names of a tied parameter.
    """

    parameters: tuple[nn.Parameter, ...]
    elsewhere: frozenset[str]


@cache
def _pipelined_models() -> WeakKeyDictionary[nn.Module, StageParameters]:
    """Return the stage parameters of each pipelined model of this process."""
    return WeakKeyDictionary()


def watch_stage(
    module: nn.Module, whole: nn.Module, stages: Mapping[str, tuple[int, ...]], stage: int
) -> None:
    """Reject norms, LBFGS and saved optimizer states over the parameters of one pipeline stage.

    Args:
        module: this rank's stage of the model.
        whole: the full model, on the meta device.
        stages: for each parameter, by its first name, the stages that own it; a parameter that is
            missing is owned by the first stage.
        stage: index of this rank's stage.
    """
    first = {id(parameter): name for name, parameter in whole.named_parameters()}
    elsewhere = frozenset(
        name
        for name, parameter in whole.named_parameters(remove_duplicate=False)
        if set(stages.get(first[id(parameter)], (0,))) != {stage}
    )
    _pipelined_models()[module] = StageParameters(tuple(module.parameters()), elsewhere)
    before_norms(_check_norm)
    _watch_optimizers()


def _check_norm(function: str, tensors: Sequence[Tensor], source: nn.Module | None) -> None:
    """Check that a norm is not over parameters or gradients of one stage only.

    Args:
        function: name of the function of `torch.nn.utils` that computes the norm.
        tensors: the tensors that the function was called with.
        source: the module whose parameters the tensors are; None if unknown.

    Raises:
        PlanError: if some of the tensors are parameters or gradients of a stage, unless this stage
            alone owns all parameters of `source`.
    """
    argument_ids = {_memory_id(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
    for module, (parameters, elsewhere) in _pipelined_models().items():
        stage_ids = {_memory_id(p) for p in parameters}
        stage_ids |= {_memory_id(p.grad) for p in parameters if p.grad is not None}
        if argument_ids & stage_ids and not _is_complete(source, module, elsewhere):
            raise PlanError(
                f"`torch.nn.utils.{function}`{user_line()} was called on a model in pipeline "
                "stages, but a rank has the parameters of its own stage only, so each stage would "
                "clip by a different norm\ncall `net.clip_grad_norm_(max_norm)`, which clips by "
                "the norm over all stages and returns it (`math.inf` to clip nothing); to clip by "
                "the norm of one parameter, or of a submodule in a single stage, pass `parameter` "
                "or `submodule.parameters()` itself, not a list"
            )


def _memory_id(tensor: Tensor) -> int:
    """Return an id that is equal for tensors with the same storage."""
    local = detached_local(tensor)
    return storage_id(local) if local.layout is torch.strided else id(tensor)


def _is_complete(source: nn.Module | None, planned: nn.Module, elsewhere: frozenset[str]) -> bool:
    """Whether this stage alone owns all parameters of the submodule `source`.

    Args:
        source: a module; False is returned if it is None or no submodule of `planned`.
        planned: this rank's stage of a model.
        elsewhere: names of the parameters that other stages own.
    """
    for path, child in planned.named_modules():
        if child is source:
            return not any(name.startswith(f"{path}." if path else "") for name in elsewhere)
    return False


@cache
def _watch_optimizers() -> None:
    """Reject LBFGS on a stage, and pickling the state dict of any optimizer of a stage.

    Applies to all optimizers of this process, from their first step on.
    """
    checked = WeakSet[Optimizer]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        if optimizer in checked:
            return
        stage_ids = {id(p) for stage in _pipelined_models().values() for p in stage.parameters}
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        is_of_stage = not stage_ids.isdisjoint(map(id, parameters))
        if is_of_stage and isinstance(optimizer, LBFGS):
            raise PlanError(
                f"`LBFGS`{user_line()} needs the gradients of all parameters at once, but a rank of"
                " a model in pipeline stages has those of its own stage only\n"
                "plan without pipeline stages, or use another optimizer"
            )
        checked.add(optimizer)
        if is_of_stage:
            optimizer.register_state_dict_post_hook(mark_stage_state)

    register_optimizer_step_pre_hook(before_step)

"""Reject norms and optimizers that would combine the parameters of one pipeline stage only.

A rank has the parameters of its own stage, so their norm is not the model's. Clipping by it would
scale the gradients of each stage by a different factor.
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
    """The parameters of one stage of a planned model.

    Args:
        parameters: the parameters of this rank.
        elsewhere: names of parameters that other stages have, alone or tied; with all names of a
            tied parameter.
    """

    parameters: tuple[nn.Parameter, ...]
    elsewhere: frozenset[str]


@cache
def _stages() -> WeakKeyDictionary[nn.Module, StageParameters]:
    """The pipelined models of this process."""
    return WeakKeyDictionary()


def watch_stage(
    module: nn.Module, whole: nn.Module, stages: Mapping[str, tuple[int, ...]], stage: int
) -> None:
    """Reject norms over the parameters of a pipeline stage.

    Args:
        module: this rank's stage of the model.
        whole: the original model, without values.
        stages: the stages that have each parameter, by its first name; parameters that are missing
            are on the first stage.
        stage: the stage of this rank.
    """
    first = {id(parameter): name for name, parameter in whole.named_parameters()}
    elsewhere = frozenset(
        name
        for name, parameter in whole.named_parameters(remove_duplicate=False)
        if set(stages.get(first[id(parameter)], (0,))) != {stage}
    )
    _stages()[module] = StageParameters(tuple(module.parameters()), elsewhere)
    before_norms(_check_norm)
    _watch_optimizers()


def _check_norm(function: str, tensors: Sequence[Tensor], source: nn.Module | None) -> None:
    """Check a norm of tensors that may be parameters or gradients of a stage.

    Args:
        function: name of the function of `torch.nn.utils`.
        tensors: its arguments.
        source: the module whose parameters the tensors are, if known.

    Raises:
        PlanError: unless this stage has all parameters of `source`, and no other stage has any.
    """
    given = {_memory(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
    for module, (parameters, elsewhere) in _stages().items():
        own = {_memory(p) for p in parameters}
        own |= {_memory(p.grad) for p in parameters if p.grad is not None}
        if given & own and not _is_complete(source, module, elsewhere):
            raise PlanError(
                f"`torch.nn.utils.{function}`{user_line()} of a model in pipeline stages: a rank"
                " has the parameters of its own stage only, so each stage would clip by another"
                " norm; call `net.clip_grad_norm_(max_norm)`, which clips by the norm over all"
                " stages and returns it (`math.inf` to clip nothing); to clip by the norm of one"
                " parameter, or of a submodule in a single stage, pass `parameter` or"
                " `submodule.parameters()` itself, not a list"
            )


def _memory(tensor: Tensor) -> int:
    """An id that tensors with shared memory have in common."""
    own = detached_local(tensor)
    return storage_id(own) if own.layout is torch.strided else id(tensor)


def _is_complete(source: nn.Module | None, planned: nn.Module, elsewhere: frozenset[str]) -> bool:
    """Whether all parameters of a submodule are in this stage only."""
    for path, child in planned.named_modules():
        if child is source:
            return not any(name.startswith(f"{path}." if path else "") for name in elsewhere)
    return False


@cache
def _watch_optimizers() -> None:
    """Make optimizers of this process reject LBFGS on a stage, and saving the state of a stage."""
    seen = WeakSet[Optimizer]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        if optimizer in seen:
            return
        own = {id(p) for stage in _stages().values() for p in stage.parameters}
        given = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        of_stage = not own.isdisjoint(map(id, given))
        if of_stage and isinstance(optimizer, LBFGS):
            raise PlanError(
                f"`LBFGS`{user_line()} on a model in pipeline stages: it computes with the"
                " gradients of all parameters at once, and a rank has those of its own stage only\n"
                "plan without stages, or use another optimizer"
            )
        seen.add(optimizer)
        if of_stage:
            optimizer.register_state_dict_post_hook(mark_stage_state)

    register_optimizer_step_pre_hook(before_step)

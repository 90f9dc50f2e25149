"""What is wrong if it is computed or saved from the parameters of one pipeline stage: refused.

A rank has the parameters of its own stage only, so the norm of all that it has is not that of the
model. Clipping by it would scale the gradients of each stage by a factor of its own.
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
from shardwright.core.runtime.dtensor import own_tensor
from shardwright.core.torch_internals.norms import before_norms
from shardwright.core.torch_internals.tensors import storage_id
from shardwright.errors import PlanError


class StageParameters(NamedTuple):
    """The parameters of a planned model that a rank has.

    Args:
        elsewhere: names in the model, all of them if tied, of the parameters that other stages
            have, too or alone.
    """

    parameters: tuple[nn.Parameter, ...]
    elsewhere: frozenset[str]


@cache
def _stages() -> WeakKeyDictionary[nn.Module, StageParameters]:
    """The models of this process that are planned in pipeline stages."""
    return WeakKeyDictionary()


def watch_stage(
    module: nn.Module, whole: nn.Module, stages: Mapping[str, tuple[int, ...]], stage: int
) -> None:
    """Refuses norms over the parameters of a pipeline stage.

    Args:
        module: what this rank has of the model.
        whole: the model, without values.
        stages: for each parameter, by its first name, the stages that have it; the first if it is
            left out.
        stage: that of this rank.
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
    """Checks a norm of tensors, which may share memory with a stage's parameters or gradients.

    Args:
        source: the module whose parameters they are, if that is known.

    Raises:
        PlanError: unless this stage has all parameters of `source`, and no other has any.
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
    """The same number for tensors that share memory."""
    own = own_tensor(tensor)
    return storage_id(own) if own.layout is torch.strided else id(tensor)


def _is_complete(source: nn.Module | None, planned: nn.Module, elsewhere: frozenset[str]) -> bool:
    """Whether all parameters of a submodule are in this stage, and in no other."""
    for path, child in planned.named_modules():
        if child is source:
            return not any(name.startswith(f"{path}." if path else "") for name in elsewhere)
    return False


@cache
def _watch_optimizers() -> None:
    """Lets optimizers of this process refuse to step by products over all parameters of a stage,
    and to save the state of one stage."""
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
                " gradients of all parameters at once, and a rank has those of its own stage only;"
                " plan without stages, or use another optimizer"
            )
        seen.add(optimizer)
        if of_stage:
            optimizer.register_state_dict_post_hook(mark_stage_state)

    register_optimizer_step_pre_hook(before_step)

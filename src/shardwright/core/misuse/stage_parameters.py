"""Optimizers of pipeline stages: without parameters, or with a step or state dict of one stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.misuse.caller import user_line
from shardwright.core.misuse.coupled_updates import has_coupled_updates
from shardwright.core.misuse.partial_state import mark_stage_state
from shardwright.core.runtime.total_norms import stage_models
from shardwright.errors import PlanError

log = logging.getLogger("shardwright")


@cache
def watch_optimizers_of_stages() -> None:
    """Adapt optimizers of this process to pipeline stages, from their first step on.

    It rejects steps that combine all parameters, such as those of LBFGS; pickling of a stage's
    optimizer state; and loading this state into an optimizer over other parameters. It accepts
    optimizers without parameters, because another stage may own all parameters of a module.
    """
    initialize: Callable[..., None] = Optimizer.__init__
    setattr(Optimizer, initialize.__name__, _wrap_to_accept_no_parameters(initialize))
    # Weak, so that optimizers can be freed.
    checked = WeakSet[Optimizer]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        if optimizer in checked:
            return
        stages = list(stage_models().values())
        # By id, as `==` of tensors compares their elements.
        stage_ids = {id(p) for stage in stages for p in stage.parameters.values()}
        parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        is_of_stage = not stage_ids.isdisjoint(map(id, parameters))
        # An optimizer without parameters has those of no stage on this rank, but perhaps on others.
        if is_of_stage or (stages and not parameters):
            _check_updates_are_independent(optimizer)
        # After the check, so that each step of a refused optimizer raises the error.
        checked.add(optimizer)
        if is_of_stage:
            optimizer.register_state_dict_post_hook(mark_stage_state)

    register_optimizer_step_pre_hook(before_step)
    load = Optimizer.load_state_dict

    @wraps(load)
    def load_or_explain(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        try:
            load(optimizer, state_dict)
        except ValueError as error:
            counts = [
                sum(len(group["params"]) for group in groups)
                for groups in (state_dict["param_groups"], optimizer.param_groups)
            ]
            # With equal counts, or without a planned model with stages, the error has another
            # cause.
            if counts[0] == counts[1] or not stage_models():
                raise
            raise PlanError(
                f"`load_state_dict`{user_line()}: the state has {counts[0]} parameters, but"
                f" {type(optimizer).__name__} has {counts[1]}, as with pipeline stages a rank"
                " optimizes only the parameters of its own stage\nsave with `sw.save_checkpoint` "
                "and load"
                " with `sw.load_checkpoint`, which reads checkpoints of any plan"
            ) from error

    setattr(Optimizer, load.__name__, load_or_explain)


def _wrap_to_accept_no_parameters(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return an `Optimizer.__init__` that accepts an empty list of parameters, unlike PyTorch's.

    This applies in processes with a planned model in pipeline stages.

    Args:
        initialize: `Optimizer.__init__` of PyTorch.
    """

    @wraps(initialize)
    def initialize_or_leave_empty(
        optimizer: Optimizer, params: Any, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(params, Iterable) and not isinstance(params, Tensor) and stage_models():
            params = list(params)
            if not params:
                log.warning(
                    "`%s`%s has no parameters on this rank\n"
                    "nothing to do if its modules belong to other pipeline stages; else pass a list"
                    " of parameters, not an iterator that has been read",
                    type(optimizer).__name__,
                    user_line(),
                )
                params = [{"params": []}]
        initialize(optimizer, params, *args, **kwargs)

    return initialize_or_leave_empty


def _check_updates_are_independent(optimizer: Optimizer) -> None:
    """Check that a step of `optimizer` updates each parameter independently of all others."""
    name = type(optimizer).__name__
    try:
        is_coupled = has_coupled_updates(optimizer)
    # Any error that the user's step raises over small parameters: it is not one of the training.
    except Exception as error:
        log.warning(
            "`%s`%s: whether its step combines several parameters is not known (%s); with pipeline"
            " stages it must not, as a rank has only the parameters of its own stage\n"
            "take norms by `torch.nn.utils.get_total_norm`, which includes all stages",
            name,
            user_line(),
            error,
        )
        return
    if is_coupled:
        raise PlanError(
            f"`{name}`{user_line()} combines several parameters or their gradients in a step, but"
            " with pipeline stages a rank has only those of its own stage\n"
            "take norms by `torch.nn.utils.get_total_norm`, which includes all stages, use another"
            " optimizer, or plan without pipeline stages"
        )

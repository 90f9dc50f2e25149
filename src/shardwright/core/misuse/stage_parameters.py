"""Optimizers of pipeline stages: without parameters, or with a step or state dict of one stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.misuse.caller import user_line
from shardwright.core.misuse.partial_state import mark_stage_state
from shardwright.core.runtime.total_norms import stage_models
from shardwright.errors import PlanError

log = logging.getLogger("shardwright")


@cache
def watch_optimizers_of_stages() -> None:
    """Adapt optimizers of this process to pipeline stages, from their first step on.

    Rejected: LBFGS over the parameters of one stage, pickling the state dict of a stage's
    optimizer, and loading this state dict into an optimizer over other parameters. Accepted:
    an optimizer without parameters, because another stage may own all parameters of a module.
    """
    initialize: Callable[..., None] = Optimizer.__init__
    setattr(Optimizer, initialize.__name__, _accepting_no_parameters(initialize))
    # Weak, so that optimizers can be freed.
    checked = WeakSet[Optimizer]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        if optimizer in checked:
            return
        stages = stage_models().values()
        # By id, as `==` of tensors compares their elements.
        stage_ids = {id(p) for stage in stages for p in stage.parameters.values()}
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        is_of_stage = not stage_ids.isdisjoint(map(id, parameters))
        if is_of_stage and isinstance(optimizer, LBFGS):
            raise _make_lbfgs_error()
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


def _accepting_no_parameters(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return an `Optimizer.__init__` that accepts an empty list of parameters, which PyTorch
    rejects, in a process with a planned model in stages.

    Args:
        initialize: `Optimizer.__init__` of PyTorch.
    """

    @wraps(initialize)
    def initialize_or_leave_empty(
        optimizer: Optimizer, params: Any, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(params, Iterable) and not isinstance(params, Tensor) and stage_models():
            params = list(params)
            if not params and isinstance(optimizer, LBFGS):
                raise _make_lbfgs_error()
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


def _make_lbfgs_error() -> PlanError:
    return PlanError(
        f"`LBFGS`{user_line()} needs the gradients of all parameters, but with pipeline"
        " stages a rank has only the gradients of its own stage\n"
        "plan without pipeline stages, or use another optimizer"
    )

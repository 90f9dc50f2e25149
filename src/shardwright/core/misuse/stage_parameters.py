"""Parameters of one pipeline stage: in optimizers, their state dicts, and `zip`."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from inspect import getgeneratorlocals, isgenerator
from itertools import chain
from types import CodeType, FrameType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.misuse.caller import user_line
from shardwright.core.misuse.coupled_updates import has_coupled_updates
from shardwright.core.misuse.manual_updates import manual_updates
from shardwright.core.misuse.partial_state import mark_stage_state
from shardwright.core.runtime.total_norms import stage_models
from shardwright.core.runtime.training_record import numeric_options, training_record
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
        if optimizer not in checked:
            is_of_stage = _has_parameters_of_stage(optimizer)
            if is_of_stage or _may_be_of_stages(optimizer):
                _check_updates_are_independent(optimizer)
                _record_first_options(optimizer)
            # After the check, so that each step of a refused optimizer raises the error.
            checked.add(optimizer)
            if is_of_stage:
                optimizer.register_state_dict_post_hook(mark_stage_state)
        if optimizer in _FIRST_OPTIONS:
            first = _FIRST_OPTIONS[optimizer]
            # Groups that were added later.
            first += map(numeric_options, optimizer.param_groups[len(first) :])
            training_record().of_stage.add(optimizer, first, optimizer.param_groups)
            for updates in manual_updates().values():
                updates.before_step()

    register_optimizer_step_pre_hook(before_step)
    Optimizer.load_state_dict = _wrap_load_of_optimizer(Optimizer.load_state_dict)  # type: ignore[method-assign]
    nn.Module.load_state_dict = _wrap_load_of_module(nn.Module.load_state_dict)  # type: ignore[method-assign]


_Load = TypeVar("_Load", bound=Callable[..., Any])

_LOAD_REMEDY = (
    "save with `sw.save_checkpoint` and load with `sw.load_checkpoint`, which reads checkpoints of"
    " any plan; for the model alone, use `sw.save_state_dict` and `sw.load_state_dict`"
)


def _wrap_load_of_optimizer(load: _Load) -> _Load:
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
                f" optimizes only the parameters of its own stage\n{_LOAD_REMEDY}"
            ) from error

    return cast(_Load, load_or_explain)


def _wrap_load_of_module(load: _Load) -> _Load:
    @wraps(load)
    def load_or_explain(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(self, state_dict, *args, **kwargs)
        except RuntimeError as error:
            names = set(state_dict) if isinstance(state_dict, Mapping) else set()
            # A state of all stages is loaded into each of them.
            if not any(
                set(stage.parameters) <= names & stage.stages.keys() < stage.stages.keys()
                for stage in stage_models().values()
            ):
                raise
            raise PlanError(
                f"`load_state_dict`{user_line()}: the state and {type(self).__name__} have"
                " different parameters, as with pipeline stages a rank has only those of its own"
                f" stage\n{_LOAD_REMEDY}"
            ) from error

    return cast(_Load, load_or_explain)


_FIRST_OPTIONS = WeakKeyDictionary[Optimizer, list[dict[str, float]]]()
"""Numeric options of each group of the optimizers of stages, when the optimizer was made."""


def _record_first_options(optimizer: Optimizer) -> None:
    if optimizer not in _FIRST_OPTIONS:
        _FIRST_OPTIONS[optimizer] = [numeric_options(group) for group in optimizer.param_groups]
        training_record().of_stage.watch(optimizer)


def _has_parameters_of_stage(optimizer: Optimizer) -> bool:
    # By id, as `==` of tensors compares their elements.
    stage_ids = {id(p) for stage in stage_models().values() for p in stage.parameters.values()}
    return any(id(p) in stage_ids for group in optimizer.param_groups for p in group["params"])


def _may_be_of_stages(optimizer: Optimizer) -> bool:
    """Whether the optimizer has no parameters on this rank, but perhaps those of other stages."""
    has_parameters = any(group["params"] for group in optimizer.param_groups)
    return bool(stage_models()) and not has_parameters


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
        if _has_parameters_of_stage(optimizer) or _may_be_of_stages(optimizer):
            _record_first_options(optimizer)

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


_Named = Callable[..., Iterator[tuple[str, nn.Parameter]]]


def methods_that_refuse_pairs(user_class: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return methods of a stage that raise an error where `zip` pairs its parameters, or those of a
    module that contains it, with those of a model that is not in pipeline stages, as a teacher.

    A stage has fewer parameters, so `zip` would pair each with that of another name.

    Returns:
        The methods by name, to replace those of `user_class`.
    """
    return {
        "named_parameters": _check_named_parameters(user_class.named_parameters),
        "named_modules": _check_named_modules(user_class.named_modules),
    }


def _check_named_parameters(named_parameters: _Named) -> _Named:
    """Return a `named_parameters` of a stage that checks with which parameters they are paired."""

    @wraps(named_parameters)
    def checked(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        _check_pairs(module, sys._getframe())
        yield from named_parameters(module, *args, **kwargs)

    return checked


_Modules = Callable[..., Iterator[tuple[str, nn.Module]]]


def _check_named_modules(named_modules: _Modules) -> _Modules:
    """Return a `named_modules` of a stage that checks pairs where the parameters are read of a
    module that contains the stage."""

    @wraps(named_modules)
    def checked(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        # Each enclosing module has a generator around this one.
        for frame in _iterate_frames(sys._getframe(1), _MAX_NESTED_MODULES):
            if frame.f_code is nn.Module.named_parameters.__code__:
                _check_pairs(module, frame)
        yield from named_modules(module, *args, **kwargs)

    return checked


_MAX_NESTED_MODULES = 10

_CHECKED_LINES = set[tuple[CodeType, int]]()
"""Lines of the user for which all objects have been searched for `zip`s, which takes 0.1 s."""


def _check_pairs(module: nn.Module, frame: FrameType) -> None:
    # `parameters()` is a generator around this one; a comprehension has a frame of its own.
    callers = [each for each in _iterate_frames(frame, 4) if "zip" in each.f_code.co_names]
    lines = {(each.f_code, each.f_lineno) for each in callers}
    if not lines:
        return
    frames = list(_iterate_frames(frame, 2))
    # A `zip` that has just been made is among the young objects, a search of which is fast.
    generations = range(2 if lines <= _CHECKED_LINES else 3)
    for pairs in chain.from_iterable(map(gc.get_objects, generations)):
        if type(pairs) is not zip:
            continue
        iterators = [i for held in gc.get_referents(pairs) if type(held) is tuple for i in held]
        generators = [each for each in iterators if isgenerator(each)]
        if not any(each.gi_frame in frames for each in generators):
            continue
        for owner in (getgeneratorlocals(each).get("self") for each in generators):
            if isinstance(owner, nn.Module) and not _contains_stage(owner):
                raise PlanError(
                    f"`zip`{user_line()} pairs the parameters of a planned"
                    f" {type(module).__name__} with those of a {type(owner).__name__} without"
                    " stages, but with pipeline stages a rank has only the parameters of its own"
                    " stage\ncopy the planned model (`copy.deepcopy(net)`), whose parameters are in"
                    " the same stages, or pair them inside `with sw.whole(net):`"
                )
    _CHECKED_LINES.update(lines)


def _contains_stage(module: nn.Module) -> bool:
    # Not by `modules()`, which would check again.
    return module in stage_models() or any(map(_contains_stage, module.children()))


def _iterate_frames(frame: FrameType | None, count: int) -> Iterator[FrameType]:
    while frame is not None and count:
        yield frame
        frame, count = frame.f_back, count - 1

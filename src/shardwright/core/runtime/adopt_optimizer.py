"""Move optimizers from the parameters of a model to the DTensors that replace them.

An optimizer created before `parallelize` would step, without an error, over parameters that get no
gradients. `adopt` replaces these parameters by the planned parameters; until then, a hook makes
steps of the optimizer raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.errors import PlanError

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

ORDER = "order_in_one_process"
"""Attribute of an adopted optimizer with the parameters that it had before it was adopted."""


@dataclass(eq=False)
class ParameterOrigin:
    """The link between a parameter of the user's model and the planned parameters that replace it.

    All of them have the same `ParameterOrigin` as their attribute `origin`. It keeps no tensor
    alive, so that the original model can be freed after planning.

    Args:
        name: name of the parameter in the model.
        models: the user's model and the planned models made from it.
        trained_in_original: whether an optimizer trains the parameter in the original model.
    """

    name: str
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    trained_in_original: bool = False

    def parameters_of_models(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of `models` that have this origin."""
        for model in self.models:
            path, _, leaf = self.name.rpartition(".")
            parameter = getattr(model.get_submodule(path), leaf, None)
            # The user may have replaced the parameter of this name since planning.
            if isinstance(parameter, nn.Parameter) and origin_of(parameter) is self:
                yield parameter


def mark_origins(module: nn.Module, planned: nn.Module) -> dict[str, ParameterOrigin]:
    """Attach a `ParameterOrigin` to each parameter of a model before it is planned.

    Args:
        module: the user's model.
        planned: the planned model; `module` itself if planned in place, else a copy.

    Returns:
        The origin of each parameter, by its name.
    """
    origins = {}
    for name, parameter in module.named_parameters():
        # A model that was planned before, with `copy=True`, keeps its origins, which all copies
        # share.
        origins[name] = parameter.origin = origin_of(parameter) or ParameterOrigin(name)  # type: ignore[attr-defined]
        origins[name].models.update((module, planned))
    return origins


def mark_planned(
    parameters: Mapping[str, nn.Parameter], origins: Mapping[str, ParameterOrigin]
) -> None:
    """Attach to each planned parameter the `ParameterOrigin` of the parameter that it replaces.

    Args:
        parameters: the planned parameters, by name.
        origins: the origins of the model's parameters, by name.
    """
    # Of the whole model and in its order, as a rank with pipeline stages has only some of the
    # parameters.
    model_origins = tuple(origins.values())
    for name, parameter in parameters.items():
        parameter.origin = origins[name]  # type: ignore[attr-defined]
        parameter.model_origins = model_origins  # type: ignore[attr-defined]
    _refuse_steps_of_unused_optimizers()


def adopt(optimizer: AnyOptimizer, net: nn.Module) -> AnyOptimizer:
    """Replace the parameters of an optimizer by the parameters of the planned model.

    Parameter groups, their options, schedulers and hooks remain. Parameters of other pipeline
    stages are removed from their groups.

    Args:
        optimizer: optimizer over parameters of the model that was passed to `parallelize`, before
            its first step.
        net: the planned model that `parallelize` returned.

    Returns:
        `optimizer`.

    Raises:
        PlanError: if the optimizer has state, or a parameter that the model does not have.
    """
    if optimizer.state:
        raise PlanError(
            f"{type(optimizer).__name__} has state, which `sw.adopt` does not shard\nadopt the "
            "optimizer before its first step, or create it from the parameters of the planned model"
        )
    planned = list(net.parameters())
    planned_by_origin = planned_parameters_by_origin(net)
    # Origins of all stages: parameters of other stages are removed, unknown parameters rejected.
    model_origins = frozenset[ParameterOrigin]().union(
        *(getattr(p, "model_origins", ()) for p in planned)
    )
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        parameters = []
        for index, parameter in enumerate(group["params"]):
            origin = origin_of(parameter)
            if origin not in model_origins:
                raise PlanError(
                    f"parameter {index} of group {number} of the optimizer, of shape "
                    f"{tuple(parameter.shape)}, belongs neither to the original nor to the planned"
                    " model\ncreate the optimizer from the parameters of the model that is passed"
                    " to `sw.plan`, or of the model that `sw.parallelize` returns"
                )
            if origin in planned_by_origin:
                parameters.append(planned_by_origin[origin])
        groups.append(parameters)
    # Only after all checks, so that an error leaves the optimizer unchanged.
    _remember_order(optimizer)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        # In place, since some optimizers, such as LBFGS, keep a reference to the list.
        group["params"][:] = parameters
    return optimizer


def adopt_parameters_of_model(optimizer: Optimizer, net: nn.Module) -> None:
    """Replace the parameters of one planned model in an optimizer, and keep all other parameters.

    Unlike `adopt`, supports optimizers over several models, planned or not, and optimizers with
    loaded full state, which the next step shards.

    Args:
        optimizer: optimizer over parameters of models, before its first step.
        net: a planned model.
    """
    planned = planned_parameters_by_origin(net)
    model_origins = frozenset[ParameterOrigin]().union(
        *(getattr(parameter, "model_origins", ()) for parameter in net.parameters())
    )
    _remember_order(optimizer)
    for group in optimizer.param_groups:
        parameters = []
        for parameter in group["params"]:
            origin = origin_of(parameter)
            # None for a parameter of this model that another stage owns.
            new = planned.get(origin) if origin in model_origins else parameter
            if new is not parameter and parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                if new is not None:
                    optimizer.state[new] = state
            # Parameters of other pipeline stages are left out.
            if new is not None:
                parameters.append(new)
        # In place, since some optimizers, such as LBFGS, keep a reference to the list.
        group["params"][:] = parameters


def _remember_order(optimizer: Optimizer) -> None:
    """Remember the order of an optimizer's parameters before those of other stages are removed."""
    groups = vars(optimizer).get(ORDER) or [group["params"] for group in optimizer.param_groups]
    vars(optimizer)[ORDER] = [
        # Origins where possible, since the parameters would be kept in memory.
        [each if isinstance(each, ParameterOrigin) else origin_of(each) or each for each in group]
        for group in groups
    ]


def order_in_one_process(optimizer: Optimizer) -> list[list[ParameterOrigin | nn.Parameter]]:
    """Return the parameters of each group as of a run on one process, with those of all stages.

    They are origins where parameters have one. Empty if the optimizer was created after planning.
    """
    order: list[list[ParameterOrigin | nn.Parameter]] = vars(optimizer).get(ORDER, [])
    return order


def origins_of_model(parameter: Tensor) -> tuple[ParameterOrigin, ...]:
    """Return the origins of all parameters of a planned parameter's model, in their order there."""
    origins: tuple[ParameterOrigin, ...] = getattr(parameter, "model_origins", ())
    return origins


def origin_of(parameter: Tensor) -> ParameterOrigin | None:
    """Return the `ParameterOrigin` of a parameter; None if its model has not been planned."""
    return getattr(parameter, "origin", None)


def planned_parameters_by_origin(net: nn.Module) -> dict[ParameterOrigin | None, nn.Parameter]:
    """Return the parameters of a planned model by their origins."""
    planned = {origin_of(parameter): parameter for parameter in net.parameters()}
    # Parameters that were registered after planning have no origin.
    planned.pop(None, None)
    return planned


def is_trained_in_original(parameter: Tensor) -> bool:
    """Whether the user trains the original model: its parameter has a gradient or an optimizer."""
    origin = origin_of(parameter)
    return parameter.grad is not None or (origin is not None and origin.trained_in_original)


def is_planned_parameter(parameter: Tensor) -> bool:
    """Whether `parallelize` created this parameter."""
    return hasattr(parameter, "model_origins")


# Cached, so that the hook is registered once per process.
@cache
def _refuse_steps_of_unused_optimizers() -> None:
    """Make optimizer steps raise `PlanError` if the optimizer holds the parameters of the original
    model while the gradients are in the planned model, or vice versa.

    Such a step would change no parameter.
    """

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # args[0] is the optimizer. A closure computes the gradients within the step.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        first = next(parameters, None)
        # The hook runs for every optimizer of the process, also for those of other models.
        if closure is not None or first is None or origin_of(first) is None:
            return
        # The iterator has already yielded `first`.
        _check_parameters_have_gradients(type(optimizer).__name__, [first, *parameters])

    register_optimizer_step_pre_hook(before_step)


def _check_parameters_have_gradients(optimizer: str, parameters: Iterable[Tensor]) -> None:
    parameters_with_origin = [(p, origin) for p in parameters if (origin := origin_of(p))]
    is_planned = is_planned_parameter(parameters_with_origin[0][0])
    # One gradient suffices: parameters that a backward pass did not reach have none either.
    if any(parameter.grad is not None for parameter, _ in parameters_with_origin):
        # Remembered, as `zero_grad` removes the gradients after the step.
        for parameter, origin in parameters_with_origin if not is_planned else ():
            origin.trained_in_original = origin.trained_in_original or parameter.grad is not None
        return
    for _, origin in parameters_with_origin:
        # Gradients of the other model only, planned or original, show that the two were confused.
        counterparts = (
            p for p in origin.parameters_of_models() if is_planned_parameter(p) != is_planned
        )
        if any(parameter.grad is not None for parameter in counterparts):
            raise PlanError(_make_missing_gradients_message(optimizer, origin.name, is_planned))


def _make_missing_gradients_message(optimizer: str, name: str, is_planned: bool) -> str:
    if is_planned:
        return (
            f"no parameter of this {optimizer}, which was created from the planned model, has a "
            f"gradient, but {name!r} of the model passed to `sw.parallelize(copy=True)` has\n"
            "call the planned model that `sw.parallelize` returned, not the model passed to it"
        )
    return (
        f"no parameter of this {optimizer}, which was created before `sw.parallelize`, has a "
        f"gradient, but {name!r} of the planned model has\n"
        f"create the optimizer afterwards, `torch.optim.{optimizer}(net.parameters())`, or replace "
        "its parameters by those of the planned model, `sw.adopt(optimizer, net)`"
    )

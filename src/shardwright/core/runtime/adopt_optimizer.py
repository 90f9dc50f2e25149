"""Optimizers that were made before their model was parallelized, or over the parameters of the one
that `parallelize` was given instead of those of what it returned."""

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


@dataclass(eq=False)
class Origin:
    """The identity of a parameter of a user's model, which planned parameters inherit.

    It is an attribute of all parameters that stand for the same one, and keeps no tensor alive.

    Args:
        name: name of the parameter in the model.
        models: the model and the planned models made of it.
        trained_apart: whether an optimizer trains the parameter in the original model.
    """

    name: str
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    trained_apart: bool = False

    def parameters_of_models(self) -> Iterator[nn.Parameter]:
        """The parameters with this origin."""
        for model in self.models:
            path, _, leaf = self.name.rpartition(".")
            parameter = getattr(model.get_submodule(path), leaf, None)
            if isinstance(parameter, nn.Parameter) and _origin(parameter) is self:
                yield parameter


def mark_origins(module: nn.Module, planned: nn.Module) -> dict[str, Origin]:
    """Gives each parameter of a model that is about to be planned an `Origin`.

    Args:
        module: the model with the parameters that an optimizer may have.
        planned: what `parallelize` makes of it: the same object in place, else a copy.

    Returns:
        The origins by the names of the parameters.
    """
    origins = {}
    for name, parameter in module.named_parameters():
        origins[name] = parameter.origin = _origin(parameter) or Origin(name)  # type: ignore[attr-defined]
        origins[name].models.update((module, planned))
    return origins


def mark_planned(parameters: Mapping[str, nn.Parameter], origins: Mapping[str, Origin]) -> None:
    """Gives planned parameters, by name, the origins of those that they replace."""
    family = frozenset(origins.values())
    for name, parameter in parameters.items():
        parameter.origin = origins[name]  # type: ignore[attr-defined]
        parameter.family = family  # type: ignore[attr-defined]
    _refuse_steps_of_others()


def adopt(optimizer: AnyOptimizer, net: nn.Module) -> AnyOptimizer:
    """Points an optimizer, made over the parameters of a model, at those of its parallel module.

    Groups and their options, schedulers and hooks stay. Parameters that lie on other devices
    (in another pipeline stage) leave their groups.

    Args:
        optimizer: made over parameters of the model that `net` was made from, no step taken.
        net: what `parallelize` returned for that model.

    Returns:
        `optimizer`.

    Raises:
        PlanError: if it has state already, or a parameter that the model did not have.
    """
    if optimizer.state:
        raise PlanError(
            f"{type(optimizer).__name__} has state of the parameters it was made for, which adopt "
            "does not split: make it over the parameters of the parallel module"
        )
    own = list(net.parameters())
    successors = {_origin(parameter): parameter for parameter in own}
    successors.pop(None, None)
    family = frozenset[Origin]().union(*(getattr(p, "family", ()) for p in own))
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        parameters = []
        for place, parameter in enumerate(group["params"]):
            origin = _origin(parameter)
            if origin not in family:
                raise PlanError(
                    f"parameter {place} of group {number} of the optimizer, of shape "
                    f"{tuple(parameter.shape)}, is none of the model that was parallelized: make "
                    "the optimizer over the parameters of that model, or of the parallel module"
                )
            if origin in successors:
                parameters.append(successors[origin])
        groups.append(parameters)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    return optimizer


def _origin(parameter: Tensor) -> Origin | None:
    return getattr(parameter, "origin", None)


def is_trained_apart(parameter: Tensor) -> bool:
    """Whether a parameter of a model that was given to `parallelize` is trained in that itself."""
    origin = _origin(parameter)
    return parameter.grad is not None or (origin is not None and origin.trained_apart)


def _is_planned(parameter: Tensor) -> bool:
    return hasattr(parameter, "family")


@cache
def _refuse_steps_of_others() -> None:
    """Lets optimizers of this process refuse to step over parameters without gradients where those
    that they were taken for have some.

    Raises:
        PlanError: before such a step.
    """

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # The first is itself.
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        first = next(parameters, None)
        if closure is not None or first is None or _origin(first) is None:
            return
        _check_gradients(type(optimizer).__name__, [first, *parameters])

    register_optimizer_step_pre_hook(before_step)


def _check_gradients(optimizer: str, parameters: Iterable[Tensor]) -> None:
    ours = [(parameter, origin) for parameter in parameters if (origin := _origin(parameter))]
    is_planned = _is_planned(ours[0][0])
    if any(parameter.grad is not None for parameter, _ in ours):
        for parameter, origin in ours if not is_planned else ():
            origin.trained_apart = origin.trained_apart or parameter.grad is not None
        return
    for _, origin in ours:
        others = (
            other for other in origin.parameters_of_models() if _is_planned(other) != is_planned
        )
        if any(other.grad is not None for other in others):
            raise PlanError(_ours_and_theirs(optimizer, origin.name, is_planned))


def _ours_and_theirs(optimizer: str, name: str, is_planned: bool) -> str:
    if is_planned:
        return (
            f"no parameter of this {optimizer}, made over those of the planned model, has a "
            f"gradient, but {name!r} of the model that was given to `parallelize(copy=True)` has\n"
            "call the planned model, not the one that it was copied from"
        )
    return (
        f"no parameter of this {optimizer} has a gradient, but {name!r} of the planned model has: "
        "the optimizer has the parameters that the model had before `parallelize`\n"
        f"make it afterwards, `torch.optim.{optimizer}(net.parameters())`, or point it at the new "
        "parameters, `sw.adopt(optimizer, net)`"
    )

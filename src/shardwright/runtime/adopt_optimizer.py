"""Optimizers that were made before their model was parallelized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import PlanError

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@dataclass(frozen=True, eq=False)
class Origin:
    """One parameter of a user's model. The parameters that it becomes bear it too: an object says
    no more than that they are the same, and keeps no tensor alive."""

    name: str


def remember(
    originals: Mapping[str, nn.Parameter], replacements: Mapping[str, nn.Parameter]
) -> None:
    """Notes at the `replacements`, by name, which of the `originals` they stand for."""
    origins = {name: _origin(parameter) or Origin(name) for name, parameter in originals.items()}
    for name, parameter in originals.items():
        parameter.origin = origins[name]  # type: ignore[attr-defined]
    family = frozenset(origins.values())
    for name, parameter in replacements.items():
        parameter.origin = origins[name]  # type: ignore[attr-defined]
        parameter.family = family  # type: ignore[attr-defined]


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

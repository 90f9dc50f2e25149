"""The parameters of a planned model, and what users may do to them between calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import is_
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import PlanError
from shardwright.torch_internals.modules import own_parameters
from shardwright.torch_internals.tensors import (
    getters_without_overrides,
    requires_grad,
    storage_id,
    version,
)


class PlannedParameter(NamedTuple):
    """A parameter as it was planned.

    Args:
        bearer: all parameters of the module that bears it, as that module holds them.
        leaf: its name there.
        storage: the identity of its own memory; a DTensor's is not that of its shard.
    """

    name: str
    parameter: nn.Parameter
    trained: bool
    bearer: dict[str, nn.Parameter | None]
    leaf: str
    storage: int


class PlannedParameters:
    """All parameters of a module.

    Args:
        frozen: names of those that require no gradient in the plan.
    """

    def __init__(self, module: nn.Module, frozen: Collection[str]) -> None:
        named = ((n, p, n.rpartition(".")) for n, p in module.named_parameters())
        self.all = tuple(
            PlannedParameter(
                name,
                parameter,
                name not in frozen,
                own_parameters(module.get_submodule(path)),
                leaf,
                storage_id(parameter),
            )
            for name, parameter, (path, _, leaf) in named
        )
        self._tensors = tuple(p.parameter for p in self.all)
        self._trained = tuple(p.trained for p in self.all)
        self._places = tuple(p.bearer for p in self.all), tuple(p.leaf for p in self.all)
        self._storages = tuple(p.storage for p in self.all)
        self._any_sharded = any(isinstance(p, DTensor) for p in self._tensors)

    def frozen_or_unfrozen(self) -> tuple[str, ...]:
        """Names of those whose `requires_grad` was set since the plan.

        Raises:
            PlanError: for a parameter that is not what was planned.
        """
        if not all(map(is_, map(dict.get, *self._places), self._tensors)):
            self._refuse_replaced()
        if self._any_sharded and tuple(map(storage_id, self._tensors)) != self._storages:
            self._refuse_replaced()
        with getters_without_overrides():
            if tuple(map(requires_grad, self._tensors)) == self._trained:
                return ()
        return tuple(p.name for p in self.all if p.parameter.requires_grad is not p.trained)

    def _refuse_replaced(self) -> None:
        for name, parameter, _, bearer, leaf, storage in self.all:
            if bearer.get(leaf) is not parameter:
                raise PlanError(
                    f"parameter {name!r} was replaced after planning, which would have no effect: "
                    "copy into it under `torch.no_grad()`, or replace it before `plan`"
                )
            if storage_id(parameter) != storage and isinstance(parameter, DTensor):
                raise PlanError(
                    f"`.data` of parameter {name!r} was replaced, which has no effect on a "
                    "DTensor: copy into it under `torch.no_grad()` (`parameter.copy_(value)`); "
                    "convert a model (`to`, `half`, `double`) before `plan`"
                )

    def checks_before_backward(self, recomputes: bool) -> list[Callable[[], None]]:
        """What to call before a backward pass; it raises RuntimeError as autograd does.

        Args:
            recomputes: whether that reads parameters again, which autograd does not see.
        """
        if not recomputes:
            return []
        versions = self._versions()

        def check() -> None:
            if self._versions() != versions:
                raise RuntimeError(
                    "a parameter, which the backward pass reads again to compute operators, has "
                    "been modified by an inplace operation since the forward pass"
                )

        return [check]

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(version, self._tensors))

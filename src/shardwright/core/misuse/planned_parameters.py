"""Detect parameters of a planned model that were replaced, or modified before the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, cycle
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals.modules import own_parameters
from shardwright.core.torch_internals.tensors import (
    compare_tensors_by_identity,
    getters_without_overrides,
    requires_grad,
    storage_id,
    version,
)
from shardwright.errors import PlanError

FIRST_CALLS, PARTS = 10, 8
"""Schedule of the check of parameter memory: `FIRST_CALLS` calls check all parameters, each later
call checks one in `PARTS`.

The check is slow, and code that replaces `.data` usually does so in every step.
"""


class PlannedParameter(NamedTuple):
    """A parameter of a planned module, as it was when the module was planned.

    Args:
        name: full name of the parameter in the model.
        parameter: the parameter that `parallelize` registered.
        trained: whether the parameter requires a gradient in the plan.
        storage: id of the parameter's storage when it was planned; for a DTensor, id of the
            storage of the wrapper, which differs from that of the local shard.
    """

    name: str
    parameter: nn.Parameter
    trained: bool
    storage: int


class PlannedParameters:
    """The parameters of a planned module, with checks that they have not been replaced since
    planning.

    Args:
        module: the planned module.
        frozen: names of the parameters that require no gradient in the plan.
    """

    def __init__(self, module: nn.Module, frozen: Collection[str]) -> None:
        self.all = tuple(
            PlannedParameter(name, parameter, name not in frozen, storage_id(parameter))
            for name, parameter in module.named_parameters()
        )
        self._tensors = tuple(p.parameter for p in self.all)
        # Flat tuples, which each call compares in one pass.
        self._trained = tuple(p.trained for p in self.all)
        self._paths = [path for path, _ in module.named_modules()]
        self._registered = [own_parameters(child) for child in module.modules()]
        # Copies of the dicts in which modules register parameters, to compare with those dicts
        # later.
        self._planned = list(map(dict, self._registered))
        # `.data` of an ordinary tensor may be replaced: the program reads it from the parameter.
        sharded = [p for p in self.all if isinstance(p.parameter, DTensor)]
        # Every eighth parameter, so that all are checked within `PARTS` calls.
        groups = [sharded[first::PARTS] for first in range(PARTS)]
        self._checked_in_call = chain([sharded] * FIRST_CALLS, cycle(groups))

    def frozen_or_unfrozen(self) -> tuple[str, ...]:
        """Return the names of the parameters whose `requires_grad` differs from the plan.

        Raises:
            PlanError: if a parameter or its `.data` was replaced.
        """
        with compare_tensors_by_identity():
            if self._registered != self._planned:
                self._refuse_replaced_parameters()
        for name, parameter, _, storage in next(self._checked_in_call):
            if storage_id(parameter) != storage:
                raise PlanError(
                    f"`.data` of parameter {name!r} was replaced, which has no effect on a "
                    "DTensor\ncopy the values into the parameter under `torch.no_grad()` "
                    "(`parameter.copy_(value)`); convert or resize a model (`to`, `half`, "
                    "`resize_token_embeddings`) before `sw.plan`"
                )
        # The getter of a subclass would take most of the time.
        with getters_without_overrides():
            if tuple(map(requires_grad, self._tensors)) == self._trained:
                return ()
        return tuple(p.name for p in self.all if p.parameter.requires_grad is not p.trained)

    def _refuse_replaced_parameters(self) -> None:
        for path, registered, planned in zip(
            self._paths, self._registered, self._planned, strict=True
        ):
            # Both dicts, as a parameter may have been added or removed.
            for leaf in (*planned, *registered):
                if (parameter := planned.get(leaf)) is not registered.get(leaf):
                    action = "registered" if parameter is None else "replaced"
                    name = f"{path}.{leaf}" if path else leaf
                    raise PlanError(
                        f"parameter {name!r} was {action} after planning, which "
                        "would have no effect\ncopy values into the existing parameters under "
                        "`torch.no_grad()`, or change the model before `sw.plan`"
                    )

    def checks_before_backward(self, recomputes: bool) -> list[Callable[[], None]]:
        """Return checks, to run before the backward pass, that parameters are unmodified since this
        call.

        Like autograd's version check, they raise `RuntimeError` if a parameter was modified in
        place.

        Args:
            recomputes: whether the backward pass recomputes operators; it then reads parameters
                that autograd has not saved and does not check. If false, the list is empty.
        """
        if not recomputes:
            return []
        versions = self._get_version_counters()

        def check() -> None:
            if self._get_version_counters() != versions:
                raise RuntimeError(
                    "a parameter that the backward pass reads to recompute operators has been "
                    "modified by an inplace operation since the forward pass\n"
                    "call `backward()` before modifying parameters, e.g. by `optimizer.step()`"
                )

        return [check]

    def _get_version_counters(self) -> tuple[int, ...]:
        return tuple(map(version, self._tensors))

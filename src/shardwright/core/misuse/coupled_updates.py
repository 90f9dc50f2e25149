"""Detect optimizers whose update of one parameter depends on other parameters.

With pipeline stages a rank optimizes the parameters of its own stage. A step that combines all
parameters, such as an update scaled by the norm of all gradients, would silently combine those of
one stage only. Neither the code nor the recorded operators of a step show this reliably, as values
may pass through Python numbers. Therefore a copy of the optimizer makes trial steps over small
parameters, twice; the second time one parameter has other gradients. All other parameters must be
updated equally.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from inspect import unwrap
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shardwright.core.runtime.adopt_optimizer import ParameterOrigin
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.runtime.total_norms import TotalNorms
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import TorchDispatchMode
from shardwright.core.torch_internals.tensors import storage_id

MAX_SIZE = 4
"""Maximum size of each dimension of the parameters and other tensors of a trial."""

TRIAL_STEPS = 3
"""Number of steps of a trial: more than one, as momenta can delay an effect."""

GRADIENT_FACTOR = 1e3
"""Factor of the changed gradient: large, to exceed thresholds such as a maximum norm."""


class TrialError(Exception):
    """Raised if a trial of an optimizer step would have effects outside of the trial."""


def has_coupled_updates(optimizer: Optimizer) -> bool:
    """Whether the update of a parameter by `optimizer.step` depends on other parameters.

    Norms by `torch.nn.utils` do not count, as they include all stages. `optimizer` and its
    parameters are not changed.

    Raises:
        TrialError: if the step communicates, or accesses parameters of the model.
        Exception: whatever the step raises over small parameters.
    """
    usual = _run_trial_steps(optimizer, None)
    # The first and the last parameter, as groups may have different algorithms.
    for changed in (0, len(usual) - 1):
        updated = _run_trial_steps(optimizer, changed)
        pairs = [pair for i, pair in enumerate(zip(usual, updated, strict=True)) if i != changed]
        if not all(torch.allclose(a, b, equal_nan=True) for a, b in pairs):
            return True
    return False


def _run_trial_steps(optimizer: Optimizer, changed: int | None) -> list[Tensor]:
    """Return the trial parameters after `TRIAL_STEPS` steps of a copy of `optimizer`.

    Args:
        optimizer: the optimizer.
        changed: index of the parameter whose gradients are multiplied by `GRADIENT_FACTOR`, if any.
    """
    trial = _copy_with_small_parameters(optimizer)
    parameters = list(_iterate_parameters(trial))

    @torch.no_grad()
    def set_gradients() -> Tensor:
        for index, parameter in enumerate(parameters):
            factor = GRADIENT_FACTOR if index == changed else 1
            # Of the parameter, for steps that call a closure at other parameters.
            parameter.grad = factor * (torch.cos(parameter) + index)
        return torch.ones(())

    # Without the hooks of `step`, which would count the trial as training.
    step = unwrap(type(optimizer).step)
    constant_norm = patch.object(TotalNorms, "total", lambda *_: torch.ones(()))
    prints = redirect_stdout(io.StringIO())
    isolation = _IsolationMode(optimizer)
    with (
        _seed_generators_temporarily(parameters),
        torch.no_grad(),
        prints,
        constant_norm,
        isolation,
    ):
        for _ in range(TRIAL_STEPS):
            set_gradients()
            step(trial, set_gradients)
    return [parameter.detach() for parameter in parameters]


def _copy_with_small_parameters(optimizer: Optimizer) -> Optimizer:
    """Return a copy of `optimizer` over small parameters, at least two."""
    memo: dict[int, Any] = {id(p): _make_small_parameter(p) for p in _iterate_parameters(optimizer)}
    # Optimizers inside of `optimizer` are copied with their attributes too.
    with patch.object(Optimizer, "__getstate__", _select_attributes_to_copy), _SmallTensorsMode():
        trial = deepcopy(optimizer, memo)
    while len(list(_iterate_parameters(trial))) < 2:
        trial.param_groups[0]["params"].append(_make_small_parameter(torch.zeros(2)))
    return trial


def _make_small_parameter(parameter: Tensor) -> nn.Parameter:
    shape = [min(size, MAX_SIZE) for size in parameter.shape]
    values = torch.linspace(0.1, 1, torch.Size(shape).numel()).reshape(shape)
    small = nn.Parameter(values.to(parameter.device, parameter.dtype))
    # Attributes of the user's, by which optimizers may choose an algorithm.
    attributes = vars(parameter).items()
    vars(small).update({k: v for k, v in attributes if not isinstance(v, ParameterOrigin)})
    return small


def _select_attributes_to_copy(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of `optimizer` that a trial copies: all but hooks and `step`.

    Learning rate schedulers replace `step` by a function of this optimizer.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not name.endswith("_hooks")
    }


def _iterate_parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


@contextmanager
def _seed_generators_temporarily(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Seed random generators within a context, and restore their states at its end."""
    device = parameters[0].device
    state = random.getstate()
    indices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(indices, device_type=device.type):
        torch.manual_seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)


class _SmallTensorsMode(TorchFunctionMode):
    """Mode in which copies of large tensors, such as the history of a parameter, are small and
    zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone) and max(args[0].shape, default=0) > MAX_SIZE:
            return torch.zeros_like(_make_small_parameter(args[0]))
        return func(*args, **(kwargs or {}))


class _IsolationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that rejects collectives, and operators on the parameters or gradients of an optimizer.

    Args:
        optimizer: the optimizer of the model.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parameters = list(_iterate_parameters(optimizer))
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = [detached_local(tensor) for tensor in (*parameters, *gradients)]
        self._memory = {storage_id(t) for t in tensors if t.layout is torch.strided}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise TrialError("it communicates")
        for argument in pytree.tree_leaves((args, kwargs)):
            is_strided = isinstance(argument, Tensor) and argument.layout is torch.strided
            if is_strided and storage_id(detached_local(argument)) in self._memory:
                raise TrialError("it accesses parameters that are not in its copy")
        return func(*args, **(kwargs or {}))

"""Bytes of optimizer state, and of temporary tensors of an optimizer step.

Both are measured: two steps of the PyTorch optimizer run on the meta device for each parameter
shape. An optimizer that reads values runs on a small parameter instead. The dims of this parameter
have different prime sizes, from which follows the dim to which each dim of a state tensor belongs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import count
from math import isqrt, prod

import torch
from torch import Tensor

from shardwright.core.cost.tensor_tracking import LiveBytes
from shardwright.core.layout.axes import Shape
from shardwright.errors import PlanError

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that plans and configuration files select by name.

    Args:
        constructor: optimizer class.
        keys: names of optional arguments in configuration files, besides learning rate and weight
            decay.
        required: required arguments in configuration files, with example values.
    """

    constructor: Callable[..., torch.optim.Optimizer]
    keys: tuple[str, ...] = ()
    required: Mapping[str, float] = field(default_factory=dict)

    def example(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of this class with example arguments, on which shapes and dtypes of
        its state do not depend."""
        return self.constructor(parameters, lr=1e-3, **self.required)


OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "sgd": NamedOptimizer(torch.optim.SGD),
    "momentum": NamedOptimizer(torch.optim.SGD, required={"momentum": 0.9}),
    "adam": NamedOptimizer(torch.optim.Adam, keys=("betas", "eps")),
    "adamw": NamedOptimizer(torch.optim.AdamW, keys=("betas", "eps")),
}


@dataclass(frozen=True)
class OptimizerBytes:
    """Memory of an optimizer on one device.

    Args:
        state: bytes of the optimizer state.
        temporary: additional bytes at the peak of an optimizer step.
    """

    state: int
    temporary: int


def optimizer_bytes(
    optimizer: str | torch.optim.Optimizer, parameters: Iterable[tuple[Shape, torch.dtype]]
) -> OptimizerBytes:
    """Return the bytes of state and temporary tensors of an optimizer, by measurement.

    Parameters are updated one after another, as PyTorch does on CPU.

    Args:
        optimizer: `sgd`, `momentum`, `adam`, `adamw`, or an optimizer with the options of the
            training.
        parameters: (local shape, dtype) of each parameter.

    Raises:
        PlanError: if the name of the optimizer is unknown, or its state cannot be measured.
    """
    measure_named = (
        partial(_named_optimizer_bytes, optimizer) if isinstance(optimizer, str) else None
    )
    measure = measure_named or cache(partial(_bytes_for_parameter, _optimizer_factory(optimizer)))
    state = temporary = 0
    for shape, dtype in parameters:
        measured = measure(shape, dtype)
        state += measured.state
        temporary = max(temporary, measured.temporary)
    return OptimizerBytes(state, temporary)


def optimizer_name(optimizer: str | torch.optim.Optimizer) -> str:
    """Return the name of an optimizer for tables."""
    return optimizer if isinstance(optimizer, str) else type(optimizer).__name__


def _optimizer_factory(optimizer: str | torch.optim.Optimizer) -> MakeOptimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer_class = type(optimizer)
        signature = inspect.signature(optimizer_class).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in signature}
        return lambda parameters: optimizer_class(parameters, **options)
    if optimizer not in OPTIMIZERS:
        valid = ", ".join(OPTIMIZERS)
        raise PlanError(
            f"optimizer={optimizer!r}: unknown optimizer\n"
            f"use one of {valid}, or an instance of torch.optim.Optimizer"
        )
    return OPTIMIZERS[optimizer].example


@lru_cache(maxsize=1 << 12)
def _named_optimizer_bytes(optimizer: str, shape: Shape, dtype: torch.dtype) -> OptimizerBytes:
    return _bytes_for_parameter(_optimizer_factory(optimizer), shape, dtype)


def _bytes_for_parameter(make: MakeOptimizer, shape: Shape, dtype: torch.dtype) -> OptimizerBytes:
    parameter = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    parameter.grad = torch.empty_like(parameter, requires_grad=False)
    try:
        optimizer = make([parameter])
    except (TypeError, ValueError):
        # Some optimizers do not take every parameter, such as Muon, which takes matrices only; the
        # training then has another optimizer for the others.
        return OptimizerBytes(0, 0)
    try:
        return _measure_steps(optimizer, parameter)
    except Exception:
        # The step reads values, which tensors on the meta device do not have.
        return _bytes_from_small_parameter(make, shape, dtype)


def _bytes_from_small_parameter(
    make: MakeOptimizer, shape: Shape, dtype: torch.dtype
) -> OptimizerBytes:
    """Return the bytes for a parameter of `shape`, derived from the state for a small parameter.

    Raises:
        PlanError: if a step of the optimizer fails.
    """
    # Different primes, 5, 11, 17, ..., so that the size of a state's dim identifies the dim.
    small = tuple(next(_primes_from(5 * (index + 1))) for index in range(len(shape)))
    parameter = torch.ones(small, dtype=dtype, requires_grad=True)
    parameter.grad = torch.ones_like(parameter, requires_grad=False)
    optimizer = make([parameter])
    try:
        measured = _measure_steps(optimizer, parameter)
    except Exception as error:
        raise PlanError(
            f"optimizer={type(optimizer).__name__}: its memory cannot be measured: {error}\n"
            "plan with an optimizer whose state has similar size, such as optimizer='adamw', and"
            " train with your own"
        ) from error
    sizes = dict(zip(small, shape, strict=True))
    state = sum(
        _scaled_numel(tensor.shape, sizes, prod(small), prod(shape)) * tensor.itemsize
        for values in optimizer.state.values()
        for tensor in values.values()
        if isinstance(tensor, Tensor)
    )
    temporary = measured.temporary * prod(shape) // max(prod(small), 1)
    return OptimizerBytes(state, temporary)


def _scaled_numel(state: Shape, sizes: Mapping[int, int], small: int, full: int) -> int:
    """Return the number of elements of a state tensor of the full parameter.

    Args:
        state: shape of the state tensor of the small parameter.
        sizes: size of a dim of the full parameter, by size of the dim of the small parameter.
        small, full: number of elements of the small and of the full parameter.
    """
    # A flat state tensor has as many elements as the parameter; unrelated sizes stay as they are.
    return prod(full if size == small else sizes.get(size, size) for size in state)


def _primes_from(start: int) -> Iterator[int]:
    """Return an iterator over the primes of at least `start`."""
    return (n for n in count(start) if all(n % d for d in range(2, isqrt(n) + 1)))


def _measure_steps(optimizer: torch.optim.Optimizer, parameter: Tensor) -> OptimizerBytes:
    """Return the bytes of state and temporary tensors, measured in two steps with the gradient of
    `parameter`."""
    assert parameter.grad is not None
    with LiveBytes() as live:
        live.watch([parameter, parameter.grad], "")
        # The first step creates the state; the peak of the second step is above the state by the
        # temporary tensors.
        before = live.now
        optimizer.step()
        state, start = live.now, len(live.history)
        optimizer.step()
        peak = sum(live.bytes_between(live.peak(start)).values())
    return OptimizerBytes(state - before, peak - state)

"""Bytes of optimizer state, and of temporary tensors of an optimizer step.

Both are measured: two steps of the PyTorch optimizer run on the meta device for each parameter
shape. An optimizer that reads values runs on a small real parameter instead. Its dims have
different prime sizes, so that the size of a state tensor's dim identifies the corresponding dim of
the parameter.

With an optimizer instance, a parameter has the options of its parameter group; a parameter in no
group has no state. State computed from the parameter or its gradient (`zeros_like(p)`) is a DTensor
sharded like the parameter. State created from a shape (`torch.zeros(p.shape)`) is replicated on
every device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import count
from math import isqrt, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.core.cost.tensor_tracking import LiveBytes
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.axes import Shape
from shardwright.core.runtime.muon_adamw import MuonAdamW, is_orthogonalized
from shardwright.errors import PlanError

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class TrainedShard(NamedTuple):
    """A device's shard of a trained parameter.

    Args:
        full_shape: shape of the full parameter; None if equal to `shape`.
        is_table: whether the full parameter has the shape of an embedding of the model.
    """

    shape: Shape
    dtype: torch.dtype
    full_shape: Shape | None = None
    is_table: bool = False

    @property
    def full(self) -> Shape:
        """Shape of the full parameter."""
        return self.shape if self.full_shape is None else self.full_shape


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
        """Create an optimizer with example arguments, which do not affect the shapes and dtypes of
        its state."""
        return self.constructor(parameters, lr=1e-3, **self.required)


OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "sgd": NamedOptimizer(torch.optim.SGD),
    "momentum": NamedOptimizer(torch.optim.SGD, required={"momentum": 0.9}),
    "adam": NamedOptimizer(torch.optim.Adam, keys=("betas", "eps")),
    "adamw": NamedOptimizer(torch.optim.AdamW, keys=("betas", "eps")),
    "muon": NamedOptimizer(MuonAdamW, keys=("momentum", "betas", "eps")),
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
    optimizer: str | torch.optim.Optimizer, parameters: Iterable[tuple[Any, ...]]
) -> OptimizerBytes:
    """Measure the bytes of state and temporary tensors of an optimizer.

    Parameters are updated one after another, as PyTorch does on CPU.

    Args:
        optimizer: name of an optimizer, or an optimizer over the parameters or over an example.
        parameters: `TrainedShard`s, or tuples of their fields.

    Raises:
        PlanError: if the name of the optimizer is unknown, or its state cannot be measured.
    """
    shards = [TrainedShard(*each) for each in parameters]
    # A step of LBFGS needs a closure, and its state is flat, over all parameters.
    if isinstance(optimizer, torch.optim.LBFGS):
        return _lbfgs_bytes(optimizer, shards)
    factories = _optimizer_factories_of_shards(optimizer, shards)
    # Layers repeat shapes, and a measurement runs two steps. Results of instances are cached in
    # this call only, since each call makes new constructors of their groups.
    measures = {
        make_optimizer: partial(_named_optimizer_bytes, make_optimizer)
        if isinstance(make_optimizer, str)
        else cache(partial(_optimizer_bytes_of_parameter, make_optimizer))
        for make_optimizer in set(factories)
        if make_optimizer
    }
    state = temporary = 0
    for shard, make_optimizer in zip(shards, factories, strict=True):
        if make_optimizer is None:
            continue
        measured = measures[make_optimizer](shard.shape, shard.dtype, shard.full)
        state += measured.state
        needed = measured.temporary
        # Muon collects a full matrix on one device, which runs the step on it.
        if shard.full != shard.shape and is_orthogonalized_by(optimizer, shard):
            full_update = measures[make_optimizer](shard.full, shard.dtype, shard.full)
            needed = full_update.temporary + _muon_exchange_bytes(shard)
        # A maximum: the temporary tensors of one parameter are freed before the next is updated.
        temporary = max(temporary, needed)
    return OptimizerBytes(state, temporary)


def is_orthogonalized_by(optimizer: str | torch.optim.Optimizer, shard: TrainedShard) -> bool:
    """Whether `optimizer` orthogonalizes the full matrix of a parameter that it updates."""
    if isinstance(optimizer, torch.optim.Muon):
        # `torch.optim.Muon` accepts matrices only.
        return len(shard.full) == 2
    tables: Iterable[Shape] = ()
    if isinstance(optimizer, MuonAdamW):
        tables = optimizer.defaults["tables"]
    elif optimizer != "muon":
        return False
    return not shard.is_table and is_orthogonalized(shard.full, tuple(tables))


def _muon_exchange_bytes(shard: TrainedShard) -> int:
    """Return how many more bytes Muon needs for a sharded matrix, at the peak of an optimizer step,
    than were measured with the full matrix.

    The rank that orthogonalizes the matrix holds two bfloat16 buffers of its full shape. It does
    not hold the momentum of the other shards, which the measurement includes.
    """
    buffers = 2 * prod(shard.full) * torch.bfloat16.itemsize
    return buffers - (prod(shard.full) - prod(shard.shape)) * shard.dtype.itemsize


def table_shapes_of(graph: Graph) -> frozenset[Shape]:
    """Return the shapes of the embedding tables of a model."""
    embedding = torch.ops.aten.embedding.default
    tables = (op.args[0] for op in graph.ops if op.target is embedding)
    return frozenset(table.shape for table in tables if isinstance(table, Value))


def orthogonalized_parameters(
    optimizer: str | torch.optim.Optimizer, graph: Graph
) -> frozenset[str]:
    """Return the names of the trained parameters whose updates `optimizer` orthogonalizes."""
    if not isinstance(optimizer, torch.optim.Muon | MuonAdamW) and optimizer != "muon":
        return frozenset()
    tables = table_shapes_of(graph)
    values = [value for value in graph.parameters if value.requires_grad]
    shards = [TrainedShard(v.shape, v.dtype, v.shape, v.shape in tables) for v in values]
    return frozenset(
        value.name
        for value, shard, make_optimizer in zip(
            values, shards, _optimizer_factories_of_shards(optimizer, shards), strict=True
        )
        if make_optimizer is not None and is_orthogonalized_by(optimizer, shard)
    )


StateFactory = str | MakeOptimizer
"""Name of an optimizer in `OPTIMIZERS`, or a function that creates an optimizer."""


def _optimizer_factories_of_shards(
    optimizer: str | torch.optim.Optimizer, shards: Sequence[TrainedShard]
) -> list[StateFactory | None]:
    """Return for each shard the name or constructor of its optimizer; None if it is not updated."""
    if isinstance(optimizer, str):
        # Raises for an unknown name, also if there are no parameters.
        _optimizer_factory(optimizer)
        names: list[StateFactory | None] = [optimizer] * len(shards)
        if optimizer == "muon":
            # `MuonAdamW` updates embedding tables as AdamW does.
            names = ["adamw" if shard.is_table else optimizer for shard in shards]
        return names
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _unknown_optimizer_error(optimizer)
    groups = [_optimizer_factory_of_group(optimizer, group) for group in optimizer.param_groups]
    factories: dict[Shape, list[MakeOptimizer]] = {}
    for group, make_optimizer in zip(optimizer.param_groups, groups, strict=True):
        for parameter in group["params"]:
            factories.setdefault(tuple(parameter.shape), []).append(make_optimizer)
    # The optimizer is an example, over parameters of other shapes.
    if not any(shard.full in factories for shard in shards):
        return [_optimizer_factory_of_group(optimizer, {})] * len(shards)
    # By shape, in the order of the groups: shards have no parameter objects to look up.
    return [factories[s.full].pop(0) if factories.get(s.full) else None for s in shards]


def _optimizer_factory_of_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> MakeOptimizer:
    """Return a constructor of optimizers like `optimizer` with the options of a parameter group."""
    optimizer_class = type(optimizer)
    signature = inspect.signature(optimizer_class).parameters
    options = {
        key: value
        for key, value in {**optimizer.defaults, **group}.items()
        # Groups have keys that are no arguments, such as `initial_lr` of learning-rate schedulers.
        if key in signature and key != "params"
    }
    return lambda parameters: optimizer_class(parameters, **options)


def _lbfgs_bytes(optimizer: torch.optim.LBFGS, shards: Sequence[TrainedShard]) -> OptimizerBytes:
    """Return the memory of LBFGS, whose vectors over all parameters are replicated on every device:
    a direction, a gradient, and two histories of vectors."""
    history = max(group["history_size"] for group in optimizer.param_groups)
    vector = sum(prod(shard.full) * shard.dtype.itemsize for shard in shards)
    # The gradient, its difference to the previous one, and the direction times the learning rate.
    return OptimizerBytes((2 * history + 2) * vector, 3 * vector)


def optimizer_name(optimizer: str | torch.optim.Optimizer) -> str:
    """Return the name under which tables list an optimizer."""
    return optimizer if isinstance(optimizer, str) else type(optimizer).__name__


def _optimizer_factory(optimizer: StateFactory) -> MakeOptimizer:
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise _unknown_optimizer_error(optimizer)
    return OPTIMIZERS[optimizer].example


def _unknown_optimizer_error(optimizer: object) -> PlanError:
    valid = ", ".join(OPTIMIZERS)
    return PlanError(
        f"optimizer={optimizer!r}: unknown optimizer\n"
        f"use one of {valid}, or an instance of torch.optim.Optimizer"
    )


@lru_cache(maxsize=1 << 12)
def _named_optimizer_bytes(
    optimizer: str, shape: Shape, dtype: torch.dtype, full_shape: Shape
) -> OptimizerBytes:
    # Named optimizers compute state from parameters and gradients, so `full_shape` does not matter.
    return _optimizer_bytes_of_parameter(_optimizer_factory(optimizer), shape, dtype, shape)


class _DerivedTensor(Tensor):
    """Meta tensor that is a parameter or computed from one, so that training has it as a
    DTensor."""


def _optimizer_bytes_of_parameter(
    make_optimizer: MakeOptimizer, shape: Shape, dtype: torch.dtype, full_shape: Shape
) -> OptimizerBytes:
    """Measure the bytes of an optimizer for a shard of shape `shape` of a parameter of shape
    `full_shape`."""
    parameter = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    parameter.grad = torch.empty_like(parameter, requires_grad=False)
    try:
        optimizer = make_optimizer([parameter])
    except (TypeError, ValueError):
        # Some optimizers reject parameters, such as Muon, which takes only matrices; training then
        # updates these parameters with another optimizer.
        return OptimizerBytes(0, 0)
    try:
        measured = _measure_optimizer_bytes(optimizer, parameter)
        if full_shape == shape:
            return measured
        # State that is created from a shape is replicated: counted at the full size, not that of a
        # shard.
        full_bytes = _replicated_state_bytes(make_optimizer, full_shape, dtype)
        shard_bytes = _replicated_state_bytes(make_optimizer, shape, dtype)
        return OptimizerBytes(measured.state + full_bytes - shard_bytes, measured.temporary)
    except Exception:
        # The step reads values, which tensors on the meta device do not have.
        return _extrapolate_optimizer_bytes(make_optimizer, shape, dtype, full_shape)


def _replicated_state_bytes(make_optimizer: MakeOptimizer, shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of optimizer state that is replicated even if the parameter is sharded,
    because it is created from the parameter's shape."""
    parameter = torch.empty(shape, dtype=dtype, device="meta")
    optimizer = make_optimizer([_make_derived_parameter(parameter)])
    optimizer.step()
    optimizer.step()
    tensors = _state_tensors(optimizer)
    return sum(tensor.nbytes for tensor in tensors if not isinstance(tensor, _DerivedTensor))


def _make_derived_parameter(value: Tensor) -> Tensor:
    parameter = value.as_subclass(_DerivedTensor)
    # A clone, whose storage counts beside that of the parameter.
    parameter.grad = value.clone().as_subclass(_DerivedTensor)
    return parameter.requires_grad_()


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for values in optimizer.state.values():
        yield from (tensor for tensor in values.values() if isinstance(tensor, Tensor))


def _extrapolate_optimizer_bytes(
    make_optimizer: MakeOptimizer, shape: Shape, dtype: torch.dtype, full_shape: Shape
) -> OptimizerBytes:
    """Return the bytes of an optimizer for a shard of shape `shape` of a parameter of shape
    `full_shape`, extrapolated from those measured for a small parameter.

    Raises:
        PlanError: if a step of the optimizer fails.
    """
    # Different primes, 5, 11, 17, ..., so that the size of a state's dim identifies the dim.
    small = tuple(next(_iterate_primes(5 * (index + 1))) for index in range(len(shape)))
    parameter = _make_derived_parameter(torch.ones(small, dtype=dtype))
    optimizer = make_optimizer([parameter])
    try:
        measured = _measure_optimizer_bytes(optimizer, parameter)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise PlanError(
            f"optimizer={type(optimizer).__name__}: its memory cannot be measured: {reason}\n"
            "plan with an optimizer whose state has similar size, such as optimizer='adamw', and"
            " train with your own"
        ) from error
    state = 0
    for tensor in _state_tensors(optimizer):
        stored = shape if isinstance(tensor, _DerivedTensor) else full_shape
        sizes = dict(zip(small, stored, strict=True))
        state += _scaled_numel(tensor.shape, sizes, prod(small), prod(stored)) * tensor.itemsize
    # Temporary tensors are as large as the parameter; a scalar has no elements to scale.
    temporary = measured.temporary * prod(shape) // max(prod(small), 1)
    return OptimizerBytes(state, temporary)


def _scaled_numel(
    state: Shape, sizes: Mapping[int, int], small_numel: int, actual_numel: int
) -> int:
    """Return the number of elements of a state tensor, extrapolated from a small parameter.

    Args:
        state: shape of the state tensor of the small parameter.
        sizes: size of a dim of the actual parameter, by size of the dim of the small parameter.
        small_numel: number of elements of the small parameter.
        actual_numel: number of elements of the actual parameter.
    """
    # A flat state tensor has as many elements as the parameter; unrelated sizes stay as they are.
    return prod(actual_numel if size == small_numel else sizes.get(size, size) for size in state)


def _iterate_primes(start: int) -> Iterator[int]:
    """Yield the prime numbers from `start` upward."""
    return (n for n in count(start) if all(n % d for d in range(2, isqrt(n) + 1)))


def _measure_optimizer_bytes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> OptimizerBytes:
    """Return the bytes of state and temporary tensors, measured in two steps of `optimizer` over
    `parameter`, which has a gradient."""
    assert parameter.grad is not None
    with LiveBytes() as live_bytes:
        live_bytes.watch([parameter, parameter.grad], "")
        # The first step creates the state; the peak of the second step is above the state by the
        # temporary tensors.
        before = live_bytes.current_bytes
        optimizer.step()
        state, start = live_bytes.current_bytes, len(live_bytes.history)
        optimizer.step()
        peak_bytes = sum(live_bytes.bytes_between(live_bytes.events_until_peak(start)).values())
    return OptimizerBytes(state - before, peak_bytes - state)

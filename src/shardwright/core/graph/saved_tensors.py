"""Find the tensors that autograd saves for the backward pass of an operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Op, OpTarget, Origin, Value
from shardwright.core.graph.local_map import is_opaque
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.tensors import FakeTensorMode, storage_id
from shardwright.errors import CaptureError, one_line


@dataclass(frozen=True)
class SavedTensors:
    """Tensors that autograd saves for the backward pass of one operator.

    Args:
        inputs, outputs: indices of the saved inputs and outputs.
        others: (shape, dtype) of saved tensors that are neither inputs nor outputs, such as the
            statistics of a normalization.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.others)


class RecordedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that record the tensors that autograd saves, and do not change them.

    Attributes:
        tensors: the saved tensors.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        super().__init__(self._record, lambda saved: saved)

    def _record(self, saved: Tensor) -> Tensor:
        self.tensors.append(saved)
        return saved


def saved_tensors(op: Op) -> SavedTensors:
    """Run `op` on fake tensors, and return the tensors that autograd saves for the backward pass.

    Saved parameters are included, although they take no additional memory. Operators with equal
    arguments are run once.

    Raises:
        CaptureError: if `op` rejects its arguments. A trace may succeed nevertheless.
    """
    saved: SavedTensors | None = op.cache.get("saved_tensors")
    if saved is None:
        # Without a differentiable input autograd records nothing.
        differentiable = any(value.differentiable for value in op.inputs)
        saved = _run_on_fake_tensors(_OperatorKey.of(op)) if differentiable else SavedTensors()
        op.cache["saved_tensors"] = saved
    return saved


@dataclass(frozen=True, slots=True)
class _OperatorKey:
    """Key under which tensors saved by equal operators are cached.

    Args:
        target: the operator's target.
        arguments: `repr` of the arguments, with shape, strides, dtype and differentiability of each
            tensor.
        op: an operator with this key; ignored when keys are compared.
        strides: strides of inputs that are not contiguous; compared as part of `arguments`.
    """

    target: OpTarget
    arguments: str
    op: Op = field(compare=False)
    strides: Mapping[Value, tuple[int, ...]] = field(compare=False)

    @classmethod
    def of(cls, op: Op, strides: Mapping[Value, tuple[int, ...]] = MappingProxyType({})) -> Self:
        def tensor_type(value: Value) -> tuple[Any, ...]:
            return value.shape, strides.get(value), value.dtype, value.differentiable

        # As text, because lists among the arguments have no hash.
        arguments = repr(pytree.tree_map_only(Value, tensor_type, (op.args, op.kwargs)))
        return cls(op.target, arguments, op, strides)


@lru_cache(maxsize=1 << 12)
def _run_on_fake_tensors(key: _OperatorKey) -> SavedTensors:
    op = key.op
    fake, inputs = FakeTensorMode(), list[Tensor]()

    def tensor(value: Value) -> Tensor:
        # Not on the meta device, on which attention is decomposed: CPU and CUDA have a fused
        # kernel, which saves far less.
        fake_input = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        if value in key.strides:
            fake_input = torch.empty_strided(
                value.shape, key.strides[value], dtype=value.dtype, device="cpu"
            )
        inputs.append(fake_input.requires_grad_(value.differentiable))
        return fake_input

    with fake:
        args, kwargs = op.arguments(tensor)
    try:
        return _record_saved_tensors(op.target, args, kwargs, inputs, fake)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CaptureError(
            f"{op.source}: the operator {op.name!r} ({op.short_name}) cannot run:"
            f" {one_line(error)}\ncorrect its arguments, which one device rejects too"
        ) from error


def saved_by_call(target: OpOverload, args: Any, kwargs: Any) -> SavedTensors:
    """Return the tensors that autograd saves in a call of an operator, if all floating-point inputs
    are differentiable.

    Args:
        target: the operator.
        args, kwargs: arguments with tensors of any kind, whose values are not read.
    """
    fake, inputs = FakeTensorMode(), list[Tensor]()

    def tensor(value: Tensor) -> Tensor:
        fake_input = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        inputs.append(fake_input.requires_grad_(value.is_floating_point() or value.is_complex()))
        return fake_input

    with fake:
        args, kwargs = pytree.tree_map_only(Tensor, tensor, (args, kwargs))
    return _record_saved_tensors(target, args, kwargs, inputs, fake)


def _record_saved_tensors(
    target: Any, args: Any, kwargs: Any, inputs: list[Tensor], fake: FakeTensorMode
) -> SavedTensors:
    recorded = RecordedTensors()
    # The caller may run under `torch.no_grad`.
    with fake, torch.enable_grad(), recorded:
        results = target(*args, **kwargs)
    outputs = [r for r in _flatten_results(results) if isinstance(r, Tensor)]
    return _classify_saved_tensors(recorded.tensors, inputs, outputs)


def _classify_saved_tensors(
    packed: list[Tensor], inputs: list[Tensor], outputs: list[Tensor]
) -> SavedTensors:
    """Classify the tensors that autograd saved as inputs, outputs or other tensors, by storage.

    Args:
        packed: the saved tensors, in any order.
        inputs, outputs: the tensor inputs and outputs of the operator.
    """
    location_of: dict[int, tuple[str, int]] = {}
    for role, tensors in (("input", inputs), ("output", outputs)):
        for index, tensor in enumerate(tensors):
            # Inputs first: an output that is a view of an input takes no memory of its own.
            location_of.setdefault(storage_id(tensor), (role, index))
    locations = [location_of.get(storage_id(saved)) for saved in packed]
    # By storage: a tensor that the gradients of two inputs need is packed twice, but stored once.
    others = {
        storage_id(saved): saved
        for saved, location in zip(packed, locations, strict=True)
        if location is None
    }
    return SavedTensors(
        inputs=tuple(sorted({loc[1] for loc in locations if loc and loc[0] == "input"})),
        outputs=tuple(sorted({loc[1] for loc in locations if loc and loc[0] == "output"})),
        others=tuple((tuple(saved.shape), saved.dtype) for saved in others.values()),
    )


def _flatten_results(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


InputUse = tuple[str, int]
"""(Name of an operator, index of one of its inputs)."""

aten = torch.ops.aten


def needed_in_backward(graph: Graph) -> frozenset[InputUse]:
    """Return the operator inputs that autograd saves for the backward pass and that are parameters
    or buffers.

    For example, a linear layer saves its weight, but an embedding does not save its table. If a
    view of a parameter is saved, the input of the first view is returned instead. A `local_map` is
    assumed to save all inputs.
    """
    needed: set[InputUse] = set()
    views: dict[Value, InputUse] = {}
    bases, strides = _find_views(graph, [*graph.parameters, *graph.buffers])
    for op in graph.ops:
        uses = {
            index: views.get(value, (op.name, index))
            for index, value in enumerate(op.inputs)
            if value in bases or value.origin in (Origin.PARAMETER, Origin.BUFFER)
        }
        if not uses:
            continue
        if any(value in bases for value in op.outputs):
            # The viewed tensor is the first input.
            views |= dict.fromkeys(op.outputs, uses[0])
            continue
        # Autograd saves inputs of an operator, but does not read them if its outputs are detached.
        if not any(value.differentiable for value in op.outputs):
            continue
        saved: Iterable[int] = range(len(op.inputs))
        if not is_opaque(op.target):
            # A linear layer of an expanded parameter saves a copy, not the parameter.
            key = _OperatorKey.of(op, {v: strides[v] for v in op.inputs if v in strides})
            saved = (_run_on_fake_tensors(key) if key.strides else saved_tensors(op)).inputs
        needed.update(use for index, use in uses.items() if index in saved)
    return frozenset(needed)


def saved_before_update(graph: Graph) -> frozenset[Value]:
    """Return the buffers that `forward` updates and whose old values the backward pass reads."""
    updated = frozenset(before for before, _ in graph.updates).intersection(graph.buffers)
    if not updated:
        return updated
    uses = needed_in_backward(graph)
    return updated.intersection(graph.by_name[name].inputs[index] for name, index in uses)


def returned_before_update(graph: Graph) -> frozenset[Value]:
    """Return the buffers that `forward` updates and whose old values it returns.

    This includes views of old values, and old values that are assigned to another buffer.
    """
    updated = frozenset(before for before, _ in graph.updates).intersection(graph.buffers)
    if not updated:
        return updated
    buffer_of = {buffer: buffer for buffer in updated} | view_bases(graph, updated)
    # An update of a buffer by its old value changes nothing.
    results = (*graph.output_values, *(value for before, value in graph.updates if value != before))
    return frozenset(buffer_of[value] for value in results if value in buffer_of)


def view_bases(graph: Graph, bases: Iterable[Value]) -> dict[Value, Value]:
    """Map each view of a parameter or buffer to that parameter or buffer.

    Operators that may return a view are run on fake tensors: `to` copies if the dtype changes, and
    `reshape` if strides do not allow a view.

    Args:
        graph: the graph whose operators make the views.
        bases: parameters and buffers, which are contiguous.
    """
    return _find_views(graph, bases)[0]


def _find_views(
    graph: Graph, bases: Iterable[Value]
) -> tuple[dict[Value, Value], dict[Value, tuple[int, ...]]]:
    """Return (the base of each view, the strides of each view that is not contiguous)."""
    base_of = {base: base for base in bases}
    fakes: dict[Value, Tensor] = {}
    with FakeTensorMode(), torch.no_grad():

        def tensor(value: Value) -> Tensor:
            if value not in fakes:
                fakes[value] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            return fakes[value]

        # In execution order, so that views of views are found.
        for op in graph.ops:
            # ATen's views have the viewed tensor as first argument.
            if not op.inputs or op.inputs[0] not in base_of or not _may_return_view(op):
                continue
            args, kwargs = op.arguments(tensor)
            results = [
                r for r in _flatten_results(op.target(*args, **kwargs)) if isinstance(r, Tensor)
            ]
            storage = storage_id(tensor(op.inputs[0]))
            if all(storage_id(result) == storage for result in results):
                fakes |= zip(op.outputs, results, strict=True)
                base_of |= dict.fromkeys(op.outputs, base_of[op.inputs[0]])
    views = {value: base for value, base in base_of.items() if value != base}
    return views, {v: fakes[v].stride() for v in views if not fakes[v].is_contiguous()}


def _may_return_view(op: Op) -> bool:
    """Whether an output of the operator may be a view of its first input."""
    if not isinstance(op.target, OpOverload):
        return False
    # The schema of `type_as` does not tell that it may return its input.
    returns = schema_of(op.target).returns
    return op.target is aten.type_as.default or any(r.alias_info is not None for r in returns)

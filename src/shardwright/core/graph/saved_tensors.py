"""Which tensors autograd saves for the backward pass of an operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Kind, Op, OpTarget, Value
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.tensors import FakeTensorMode, storage_id


@dataclass(frozen=True)
class SavedTensors:
    """What autograd saves for the backward pass of one operator.

    Args:
        inputs, outputs: indices of the inputs and outputs that it saves.
        others: shape and dtype of tensors that exist only for the backward pass, such as the
            statistics of a normalization.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.others)


def saved_tensors(op: Op) -> SavedTensors:
    """What autograd saves for `op`, found by running it on fake tensors.

    The fake tensors claim to be on the CPU: on the meta device attention is decomposed, whereas CPU
    and CUDA have a fused kernel that saves far less. Saved parameters are included, although they
    take no additional memory. Operators with equal arguments are run once.
    """
    if op not in _KNOWN:
        trains = any(value.differentiable for value in op.inputs)
        _KNOWN[op] = _run_on_fakes(_SavedKey.of(op)) if trains else SavedTensors()
    return _KNOWN[op]


_KNOWN: WeakKeyDictionary[Op, SavedTensors] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _SavedKey:
    """A cache key: an operator that equals others with the same target and abstract arguments."""

    target: OpTarget
    arguments: str
    op: Op = field(compare=False)

    @classmethod
    def of(cls, op: Op) -> _SavedKey:
        return cls(
            op.target, repr(pytree.tree_map_only(Value, _abstract, (op.args, op.kwargs))), op
        )


def _abstract(value: Value) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.differentiable


@lru_cache(maxsize=1 << 12)
def _run_on_fakes(key: _SavedKey) -> SavedTensors:
    op = key.op
    fake, inputs = FakeTensorMode(), list[Tensor]()

    def tensor(value: Value) -> Tensor:
        fake_input = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        inputs.append(fake_input.requires_grad_(value.differentiable))
        return fake_input

    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    with (
        fake,
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved),
    ):
        args, kwargs = op.arguments(tensor)
        results = op.target(*args, **kwargs)
    outputs = [r for r in _leaves(results) if isinstance(r, Tensor)]
    return _classify(packed, inputs, outputs)


def _classify(packed: list[Tensor], inputs: list[Tensor], outputs: list[Tensor]) -> SavedTensors:
    location_of: dict[int, tuple[str, int]] = {}
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for index, known in enumerate(tensors):
            location_of.setdefault(storage_id(known), (kind, index))
    locations = [location_of.get(storage_id(saved)) for saved in packed]
    # What two gradients need is kept once.
    others = {
        storage_id(saved): saved
        for saved, place in zip(packed, locations, strict=True)
        if place is None
    }
    return SavedTensors(
        inputs=tuple(sorted({place[1] for place in locations if place and place[0] == "input"})),
        outputs=tuple(sorted({place[1] for place in locations if place and place[0] == "output"})),
        others=tuple((tuple(saved.shape), saved.dtype) for saved in others.values()),
    )


def _leaves(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


InputUse = tuple[str, int]
"""An input of an operator: its name and the index of the input."""

aten = torch.ops.aten


def needed_in_backward(graph: Graph) -> frozenset[InputUse]:
    """The inputs that read a parameter or a buffer whose values the backward pass needs.

    A linear layer saves its weight; an embedding and an addition do not. If a view of a parameter
    is saved, the input of the first view counts.
    """
    needed: set[InputUse] = set()
    views: dict[Value, InputUse] = {}
    for op in graph.ops:
        uses = {
            index: views.get(value, (op.name, index))
            for index, value in enumerate(op.inputs)
            if value.kind in (Kind.PARAMETER, Kind.BUFFER) or value in views
        }
        if not uses:
            continue
        if _is_view(op) and 0 in uses:
            views[op.output] = uses[0]
            continue
        saved = saved_tensors(op)
        needed.update(use for index, use in uses.items() if index in saved.inputs)
    return frozenset(needed)


def saved_before_update(graph: Graph) -> frozenset[Value]:
    """The buffers that `forward` updates and whose old values the backward pass needs."""
    updated = frozenset(before for before, _ in graph.updates).intersection(graph.buffers)
    if not updated:
        return updated
    uses = needed_in_backward(graph)
    return updated.intersection(graph.by_name[name].inputs[index] for name, index in uses)


def returned_before_update(graph: Graph) -> frozenset[Value]:
    """The buffers that `forward` updates and whose old values it also returns, or puts into another
    buffer, themselves or as views: both are read after the update."""
    updated = frozenset(before for before, _ in graph.updates).intersection(graph.buffers)
    memory = {buffer: buffer for buffer in updated}
    for op in graph.ops if updated else ():
        if _is_view(op) and op.inputs[0] in memory:
            memory |= dict.fromkeys(op.outputs, memory[op.inputs[0]])
    read = (*graph.output_values, *(value for before, value in graph.updates if value != before))
    return frozenset(memory[value] for value in read if value in memory)


def _is_view(op: Op) -> bool:
    """Whether the output shares the storage of the first input; a parameter's reshape does."""
    if op.target is aten.reshape.default:
        return True
    if not isinstance(op.target, OpOverload):
        return False
    returns = schema_of(op.target).returns
    return len(returns) == 1 and returns[0].alias_info is not None

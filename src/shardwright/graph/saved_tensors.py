"""Which tensors autograd keeps of an operator for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.torch_internals import pytree
from shardwright.torch_internals.operators import OpOverload, schema_of
from shardwright.torch_internals.tensors import FakeTensorMode, storage_id


@dataclass(frozen=True)
class SavedTensors:
    """What an operator keeps when gradients flow through it.

    Args:
        inputs, outputs: indices of those among its tensors that it keeps.
        others: shape and dtype of tensors that it makes for its backward pass alone, such as the
            statistics of a normalization.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.others)


def saved_tensors(op: Op) -> SavedTensors:
    """Runs the operator on fake tensors, which compute nothing, and looks what it keeps.

    They are of the CPU: the meta device would take attention apart, where CPU and CUDA have one
    kernel that keeps far less. Parameters among the inputs count too: they are kept, though they
    take no further memory. Operators that are alike are run once.
    """
    if not any(value.requires_grad for value in op.inputs):
        return SavedTensors()
    return _found(_SavedKey(op))


class _SavedKey:
    """An operator, equal to others with the same arguments, shapes, dtypes and gradients."""

    def __init__(self, op: Op) -> None:
        self.op = op
        described = pytree.tree_map_only(Value, _described, (op.args, op.kwargs))
        self._key = (op.target, repr(described))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SavedKey) and self._key == other._key


def _described(value: Value) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.requires_grad


@lru_cache(maxsize=1 << 12)
def _found(alike: _SavedKey) -> SavedTensors:
    op = alike.op
    fake, inputs = FakeTensorMode(), list[Tensor]()

    def tensor(value: Value) -> Tensor:
        made = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        inputs.append(made.requires_grad_(value.requires_grad))
        return made

    packed: list[Tensor] = []

    def pack(kept: Tensor) -> Tensor:
        packed.append(kept)
        return kept

    with (
        fake,
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept),
    ):
        args, kwargs = op.arguments(tensor)
        results = op.target(*args, **kwargs)
    outputs = [r for r in _leaves(results) if isinstance(r, Tensor)]
    return _sorted(packed, inputs, outputs)


def _sorted(packed: list[Tensor], inputs: list[Tensor], outputs: list[Tensor]) -> SavedTensors:
    places: dict[int, tuple[str, int]] = {}
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for index, known in enumerate(tensors):
            places.setdefault(storage_id(known), (kind, index))
    found = [places.get(storage_id(kept)) for kept in packed]
    others = [k for k, place in zip(packed, found, strict=True) if place is None]
    return SavedTensors(
        inputs=tuple(sorted({place[1] for place in found if place and place[0] == "input"})),
        outputs=tuple(sorted({place[1] for place in found if place and place[0] == "output"})),
        others=tuple((tuple(kept.shape), kept.dtype) for kept in others),
    )


def _leaves(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


InputUse = tuple[str, int]
"""An input of an operator: its name and the index of the input."""

aten = torch.ops.aten


def needed_in_backward(graph: Graph) -> frozenset[InputUse]:
    """The inputs that read a parameter whose numbers the backward pass needs.

    A linear layer keeps its weight, an embedding and an addition do not. Where a view of a
    parameter is kept, the input counts that the first view was made from.
    """
    kept: set[InputUse] = set()
    views: dict[Value, InputUse] = {}
    known: dict[Any, SavedTensors] = {}
    for op in graph.ops:
        uses = {
            index: views.get(value, (op.name, index))
            for index, value in enumerate(op.inputs)
            if value.kind is Kind.PARAMETER or value in views
        }
        if not uses:
            continue
        if _is_view(op) and 0 in uses:
            views[op.output] = uses[0]
            continue
        found = _saved(op, known)
        kept.update(use for index, use in uses.items() if index in found.inputs)
    return frozenset(kept)


def _saved(op: Op, known: dict[Any, SavedTensors]) -> SavedTensors:
    """Equal operators keep the same; `known` holds what was found."""

    def described(value: Value) -> tuple[Any, ...]:
        return value.shape, value.dtype, value.requires_grad

    key = repr((op.target, pytree.tree_map_only(Value, described, (op.args, op.kwargs))))
    if key not in known:
        known[key] = saved_tensors(op)
    return known[key]


def _is_view(op: Op) -> bool:
    """Whether the output shares the storage of the first input; a reshape of a parameter does."""
    if op.target is aten.reshape.default:
        return True
    if not isinstance(op.target, OpOverload):
        return False
    returns = schema_of(op.target).returns
    return len(returns) == 1 and returns[0].alias_info is not None

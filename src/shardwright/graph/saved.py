"""Which tensors autograd keeps of an operator for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from shardwright.graph.graph import Op, Value


@dataclass(frozen=True)
class Saved:
    """What an operator keeps when gradients flow through it.

    Args:
        inputs, outputs: indices of those among its tensors that it keeps.
        others: shape and dtype of tensors that it makes for its backward pass alone, such as the
            statistics of a normalisation.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.others)


def saved(op: Op) -> Saved:
    """Runs the operator on fake tensors, which compute nothing, and looks what it keeps.

    They are of the CPU: the meta device would take attention apart, where CPU and CUDA have one
    kernel that keeps far less. Parameters among the inputs count too: they are kept, though they
    take no further memory. Operators that are alike are run once.
    """
    if not any(value.requires_grad for value in op.inputs):
        return Saved()
    return _found(_Alike(op))


class _Alike:
    """An operator, equal to others with the same arguments, shapes, dtypes and gradients."""

    def __init__(self, op: Op) -> None:
        self.op = op
        described = pytree.tree_map_only(Value, _described, (op.args, op.kwargs))
        self._key = (op.target, repr(described))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._key == other._key


def _described(value: Value) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.requires_grad


@lru_cache(maxsize=1 << 12)
def _found(alike: _Alike) -> Saved:
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


def _sorted(packed: list[Tensor], inputs: list[Tensor], outputs: list[Tensor]) -> Saved:
    places: dict[int, tuple[str, int]] = {}
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for index, known in enumerate(tensors):
            places.setdefault(_storage(known), (kind, index))
    found = [places.get(_storage(kept)) for kept in packed]
    others = [k for k, place in zip(packed, found, strict=True) if place is None]
    return Saved(
        inputs=tuple(sorted({place[1] for place in found if place and place[0] == "input"})),
        outputs=tuple(sorted({place[1] for place in found if place and place[0] == "output"})),
        others=tuple((tuple(kept.shape), kept.dtype) for kept in others),
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _leaves(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]

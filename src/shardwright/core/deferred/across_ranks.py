"""Deferred tensors on several ranks: compare records, and share rank 0's generator states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwright.core.agreement.content_hash import content_hash
from shardwright.core.deferred.init_record import Record, StorageView, TensorVersion
from shardwright.core.deferred.tensor import Deferred
from shardwright.core.torch_internals import pytree


def records_of(tensors: Iterable[Tensor]) -> list[Record]:
    """The distinct records of the deferred ones of `tensors`."""
    return list(dict.fromkeys(t._record for t in tensors if isinstance(t, Deferred)))


def init_record_lines(tensors: Iterable[Tensor]) -> Iterator[str]:
    """One line per recorded operation, without states of generators."""
    for record in records_of(tensors):
        for number, operation in enumerate(record.operations):
            leaves = pytree.tree_leaves((operation.args, operation.kwargs))
            arguments = ", ".join(filter(None, map(_text, leaves)))
            yield f"initialization {number}: {operation.function}({arguments})"


def share_starts(tensors: Iterable[Tensor], share: Callable[[dict[str, Tensor]], object]) -> None:
    """Replace the generator states from which deferred tensors are drawn.

    If that changes a state, the generators themselves stay as they are after a replay.

    Args:
        share: overwrites the states that it is passed.
    """
    for record in records_of(tensors):
        starts = {
            f"state {number}": operation.draw.start
            for number, operation in enumerate(record.operations)
            if operation.draw is not None and isinstance(operation.draw.start, Tensor)
        }
        before = [state.clone() for state in starts.values()]
        share(starts)
        if not all(map(torch.equal, before, starts.values())):
            record.leave_generators()


def _text(leaf: Any) -> str:
    if isinstance(leaf, TensorVersion):
        return f"values with the hash {int(content_hash(leaf.tensor)):x}"
    if isinstance(leaf, StorageView):
        return f"{list(leaf.shape)}"
    return "" if isinstance(leaf, torch.Generator) else repr(leaf)

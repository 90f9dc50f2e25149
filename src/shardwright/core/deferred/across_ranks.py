"""Deferred tensors on several ranks: compare their records, and use rank 0's generator states."""

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
    """Return the distinct initialization records of the deferred tensors among `tensors`."""
    # A dict keeps the order of `tensors`, so that all ranks share the states of records in one
    # order.
    return list(dict.fromkeys(t._record for t in tensors if isinstance(t, Deferred)))


def init_record_lines(tensors: Iterable[Tensor]) -> Iterator[str]:
    """Yield one line per operation that initializes deferred tensors among `tensors`.

    Ranks compare these lines. The lines omit generator states: ranks may have different seeds, and
    use rank 0's states.
    """
    for record in records_of(tensors):
        for number, operation in enumerate(record.operations):
            leaves = pytree.tree_leaves((operation.args, operation.kwargs))
            arguments = ", ".join(filter(None, map(_describe_argument, leaves)))
            yield f"initialization {number}: {operation.function}({arguments})"


def share_generator_states(
    tensors: Iterable[Tensor], share: Callable[[dict[str, Tensor]], object]
) -> None:
    """Replace the generator states from which the random draws of deferred tensors start.

    If `share` changes a state, the draws belong to the random stream of another rank. A replay then
    does not advance this rank's generators.

    Args:
        tensors: deferred tensors; ordinary tensors among them are ignored.
        share: function that is called with the states by name, and may overwrite them in place,
            e.g. by a broadcast from rank 0.
    """
    for record in records_of(tensors):
        # Only the first draw of a stream has a state; later draws start where the previous one
        # ended.
        start_states = {
            f"state {number}": operation.draw.start
            for number, operation in enumerate(record.operations)
            if operation.draw is not None and isinstance(operation.draw.start, Tensor)
        }
        before = [state.clone() for state in start_states.values()]
        # May be collective: all ranks have the same records, hence states of the same number and
        # size.
        share(start_states)
        if not all(map(torch.equal, before, start_states.values())):
            record.forget_generator_states()


def _describe_argument(leaf: Any) -> str:
    if isinstance(leaf, TensorVersion):
        return f"values with the hash {int(content_hash(leaf.tensor)):x}"
    if isinstance(leaf, StorageView):
        return f"{list(leaf.shape)}"
    # The `repr` of a generator contains its address, which differs between ranks.
    return "" if isinstance(leaf, torch.Generator) else repr(leaf)

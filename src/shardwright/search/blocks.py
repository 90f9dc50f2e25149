"""Blocks that repeat: which operators of a deep model are decided once, for all its layers.

Of a row of equal blocks (each operator like the one a period before, reading likewise) the first,
the last and one in between are decided; all in between are decided alike. So a search takes no
longer for 80 layers than for 4.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.search.indexed import IndexedGraph

FEWEST = 4
"""Fewer blocks in a row are decided one by one."""


@dataclass(frozen=True)
class Run:
    """Equal blocks in a row: `blocks` of them, each of `period` operators, from `start` on."""

    start: int
    period: int
    blocks: int


def representatives(indexed: IndexedGraph, alike: Sequence[Hashable]) -> list[int]:
    """For each operator the one that is decided for it.

    Args:
        alike: for each operator what else must be equal for it to be decided like another.
    """
    found = list(range(len(indexed.names)))
    for run in runs(indexed, alike):
        for block in range(2, run.blocks - 1):
            first = run.start + block * run.period
            for place in range(run.period):
                found[first + place] = run.start + run.period + place
    return found


def runs(indexed: IndexedGraph, alike: Sequence[Hashable]) -> list[Run]:
    """The rows of at least `FEWEST` equal blocks, none overlapping another."""
    numbers: dict[Hashable, int] = {}
    keys = np.array(
        [
            numbers.setdefault((id(kind), also), len(numbers))
            for kind, also in zip(indexed.kinds, alike, strict=True)
        ],
        dtype=np.int64,
    )
    found: list[Run] = []
    pieces = [(0, len(keys))]
    while pieces:
        start, stop = pieces.pop()
        run = _longest(indexed, keys, start, stop)
        if run is not None:
            found.append(run)
            pieces += [(start, run.start), (run.start + run.period * run.blocks, stop)]
    return found


def _longest(
    indexed: IndexedGraph, keys: np.ndarray[tuple[int], np.dtype[np.int64]], start: int, stop: int
) -> Run | None:
    """The longest row of equal blocks among operators `start` to `stop`."""
    best, length = (0, 0), 0
    part = keys[start:stop]
    for period in range(1, (stop - start) // FEWEST + 1):
        if length >= stop - start - period:
            break
        equal = part[period:] == part[:-period]
        first, size = _stretch(equal)
        if size > length:
            best, length = (start + first, period), size
    if not length or length < (FEWEST - 1) * best[1]:
        return None
    first, period = best
    reads = np.array([_reads_alike(indexed, op, period) for op in range(first, first + length)])
    offset, size = _stretch(reads)
    blocks = size // period + 1
    return Run(first + offset, period, blocks) if blocks >= FEWEST else None


def _stretch(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Start and length of the longest stretch of true flags, the first of equal ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _reads_alike(indexed: IndexedGraph, op: int, period: int) -> bool:
    """Whether the operator one period after `op` reads as it does: what is made as long before, the
    same, or a parameter or constant that its own block reads likewise."""
    for mine, theirs in zip(indexed.inputs[op], indexed.inputs[op + period], strict=True):
        if mine == theirs:
            continue
        made, makes = indexed.producer[mine], indexed.producer[theirs]
        if made is None and makes is None:
            uses = [(reader + period, place) for reader, place in indexed.consumers[mine]]
            if uses != list(indexed.consumers[theirs]):
                return False
        elif made is None or makes is None or (makes[0] - period, makes[1]) != made:
            return False
    return True

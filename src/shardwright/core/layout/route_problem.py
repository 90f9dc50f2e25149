"""The problem that `route_search` solves: states, moves and their costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.collective_spec import COLLECTIVES

AxesByDim = tuple[Axes, ...]
"""Axes that shard each dimension, most significant first."""


KINDS = tuple(COLLECTIVES)
"""Names of the operations of moves, which `Move.operation` indexes; among moves of equal cost the
first operation wins."""

# Indices instead of names, since moves are compared as tuples and the first kind wins a tie.
SLICE, REDUCE_SCATTER, PERMUTE, ALL_TO_ALL = map(
    KINDS.index, ("slice", "reduce_scatter", "permute", "all_to_all")
)
ALL_REDUCE, VARY, ALL_GATHER = map(KINDS.index, ("all_reduce", "vary", "all_gather"))

# Largest numbers of moving axes for an exact search. The number of states grows factorially, so
# all moves are tried for up to 3 axes, and with 4 only moves that bring an axis to its dimension.
ALL_MOVES_AXES, EXACT_AXES = 3, 4


class State(NamedTuple):
    """A layout during the search.

    Args:
        axes_by_dim: the axes that shard each dimension, most significant first.
        partial, varying: the partial and the varying axes.
    """

    axes_by_dim: AxesByDim
    partial: frozenset[int]
    varying: frozenset[int]


class Move(NamedTuple):
    """A collective, or a local operation whose gradient needs one, that changes a tensor's layout.

    Ties in cost are broken by comparing moves as tuples, so that all ranks find the same route.

    Args:
        operation: index in `KINDS`.
        dim: the dimension that is sharded or gathered; -1 without one.
        to_dim: the dimension that an all-to-all shards; -1 for other kinds.
        axes: the axes of the group; empty for a permute.
        axes_by_dim: the axes that shard each dimension after the move.
        varying: whether the axes are varying after the move.
    """

    operation: int
    dim: int
    to_dim: int
    axes: Axes
    axes_by_dim: AxesByDim
    varying: bool = False

    def apply(self, state: State) -> State:
        axes = frozenset(self.axes)
        partial, varying = state.partial, state.varying
        if self.operation in (REDUCE_SCATTER, ALL_REDUCE):
            partial -= axes
        elif self.varying:
            varying |= axes
        return State(self.axes_by_dim, partial, varying)


Path = tuple[Move, ...]
"""A route: its moves from the source layout to the target layout, in order."""


@dataclass(frozen=True)
class Problem:
    """A redistribution, reduced to the axes that move.

    Args:
        sizes: number of devices along each axis.
        source, target: the axes that shard each dimension.
        partial: axes over which the source is a partial sum and the target is not.
        varying: axes over which the target is varying.
        capacities: for each dimension, a number that its shard count must divide.
        differentiable: whether the cost includes the backward pass.
    """

    sizes: tuple[int, ...]
    source: AxesByDim
    target: AxesByDim
    partial: frozenset[int]
    varying: frozenset[int]
    capacities: tuple[int, ...]
    differentiable: bool

    @cached_property
    def full_size(self) -> int:
        """The size of the full tensor in units of cost, chosen so that all costs are integers.

        A local size is the full size divided by a number of shards, and a collective sends a local
        size divided by a group size. Both divisors divide the number of devices, so the full size
        is the square of that number.
        """
        return prod(self.sizes) ** 2

    @cached_property
    def target_axes(self) -> tuple[frozenset[int], ...]:
        """The axes that shard each dimension in the target, as sets."""
        return tuple(map(frozenset, self.target))

    @cached_property
    def axis_runs(self) -> tuple[AxesByDim, ...]:
        """Runs of axes that one move may add to each dimension, the longest first.

        A run consists of consecutive axes of the target. In problems of up to `ALL_MOVES_AXES`
        axes, each other axis is a run too, which a later permute may replace.
        """
        choices = []
        for target_axes in self.target:
            ends = range(len(target_axes), 0, -1)
            runs = [target_axes[begin:end] for end in ends for begin in range(end)]
            if len(self.sizes) <= ALL_MOVES_AXES:
                runs += [(axis,) for axis in range(len(self.sizes)) if axis not in target_axes]
            # Longest first: one collective over several axes sends less than one after the other.
            choices.append(tuple(sorted(runs, key=len, reverse=True)))
        return tuple(choices)

    def num_shards(self, axes: Axes) -> int:
        return prod([self.sizes[axis] for axis in axes])

    def local_size(self, axes_by_dim: AxesByDim) -> int:
        return self.full_size // prod([self.num_shards(axes) for axes in axes_by_dim])

    @property
    def start(self) -> State:
        # Only targets are varying (`redistribution_steps`).
        return State(self.source, self.partial, frozenset())

    @property
    def goal(self) -> State:
        # Axes over which the target stays partial are not part of the problem.
        return State(self.target, frozenset(), self.varying)

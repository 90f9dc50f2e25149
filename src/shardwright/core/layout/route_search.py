"""Search for the cheapest route, a sequence of collectives, from one layout to another.

Does not import torch. The words of this module:

- A *problem* leaves out axes and dimensions that do not change; axes that move together are one.
- A *state* says which dimension each axis shards, in which order, or that it is partial or varying.
- A *move* leads from one state to another: a collective, or the local operation whose gradient is
  one. Its cost is the data that one device sends (see `CollectiveSpec`), in a unit in which all
  costs of a problem are integers.
- A *route* (or path) is a sequence of moves from the source to the target.
- An axis is *settled* if it and all axes before it shard the dimension as in the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import combinations
from math import prod
from operator import add, gt
from typing import NamedTuple

from shardwright.core.layout.axes import Axes, common_length
from shardwright.core.layout.collective_spec import COLLECTIVES

Lists = tuple[Axes, ...]

KINDS = tuple(COLLECTIVES)
SLICE, REDUCE_SCATTER, PERMUTE, ALL_TO_ALL = map(
    KINDS.index, ("slice", "reduce_scatter", "permute", "all_to_all")
)
ALL_REDUCE, VARY, ALL_GATHER = map(KINDS.index, ("all_reduce", "vary", "all_gather"))

# The numbers of axes up to which the search is exact: over all moves up to the first number; up to
# the second only over moves that bring an axis to its dimension, as the states grow factorially.
ALL_MOVES_AXES, EXACT_AXES = 3, 4
# Limits on the states that the heuristic and the exact search expand.
GUIDED_STATES, EXACT_STATES = 24, 4000


class State(NamedTuple):
    """The axes that shard each dimension, most significant first; partial and varying axes."""

    lists: Lists
    partial: frozenset[int]
    varying: frozenset[int]


class Move(NamedTuple):
    """One step. Compared as a tuple if costs tie, so that all ranks find the same route."""

    kind: int
    dim: int
    to_dim: int
    axes: Axes
    lists: Lists
    varying: bool = False

    def apply(self, state: State) -> State:
        axes = frozenset(self.axes)
        partial, varying = state.partial, state.varying
        if self.kind in (REDUCE_SCATTER, ALL_REDUCE):
            partial -= axes
        elif self.varying:
            varying |= axes
        return State(self.lists, partial, varying)


Path = tuple[Move, ...]


@dataclass(frozen=True)
class Problem:
    """A redistribution in terms of the axes that move.

    Args:
        sizes: number of devices along each axis.
        source, target: the axes that shard each dimension.
        partial: axes over which the source is a partial sum and the target is not.
        varying: axes over which the target is varying.
        capacities: for each dimension the number that its number of shards must divide.
        differentiable: whether the cost includes the backward pass.
    """

    sizes: tuple[int, ...]
    source: Lists
    target: Lists
    partial: frozenset[int]
    varying: frozenset[int]
    capacities: tuple[int, ...]
    differentiable: bool

    @cached_property
    def full_size(self) -> int:
        """The size of the tensor in units of cost, such that costs are integers.

        A local size is the full size divided by a product of axes, and its part in a collective
        that divided by a group size: both divide the square of the number of devices.
        """
        return prod(self.sizes) ** 2

    @cached_property
    def target_axes(self) -> tuple[frozenset[int], ...]:
        """The axes that shard each dimension in the target, in any order."""
        return tuple(map(frozenset, self.target))

    @cached_property
    def runs(self) -> tuple[Lists, ...]:
        """The axes that one move may add to each dimension: runs of the target's, longest first.

        If all moves are tried also single other axes, which a later permute may replace.
        """
        choices = []
        for target_axes in self.target:
            ends = range(len(target_axes), 0, -1)
            runs = [target_axes[begin:end] for end in ends for begin in range(end)]
            if len(self.sizes) <= ALL_MOVES_AXES:
                runs += [(axis,) for axis in range(len(self.sizes)) if axis not in target_axes]
            choices.append(tuple(sorted(runs, key=len, reverse=True)))
        return tuple(choices)

    def num_shards(self, axes: Axes) -> int:
        return prod([self.sizes[axis] for axis in axes])

    def local_size(self, lists: Lists) -> int:
        return self.full_size // prod([self.num_shards(axes) for axes in lists])

    @property
    def start(self) -> State:
        return State(self.source, self.partial, frozenset())

    @property
    def goal(self) -> State:
        return State(self.target, frozenset(), self.varying)


@lru_cache(maxsize=1 << 16)
def route(problem: Problem) -> Path:
    """Find the cheapest moves from the source to the target: fewest bytes, then fewest moves.

    Two best-first searches. The first is a heuristic that orders states by the cost of completing
    them by the plain route (all-reduce, all-gather, slice); its result is never worse than that.
    The second is A* with a lower bound on the remaining cost, and therefore exact; it runs if at
    most `EXACT_AXES` axes move, with the result of the first as upper bound.
    """
    path = _plain_route(problem, problem.start)
    cost = _total(problem, problem.source, path)
    if len(problem.sizes) > 2:
        cost, path = _heuristic_search(problem, cost, path)
    if len(problem.sizes) <= EXACT_AXES:
        path = _exact_search(problem, cost) or path
    return path


def _heuristic_search(problem: Problem, best: int, path_to_goal: Path) -> tuple[int, Path]:
    """The best route found by expanding `GUIDED_STATES` states, and its cost."""
    done: set[State] = set()
    queue: list[tuple[int, int, Path, int, State]] = [(best, 0, (), 0, problem.start)]
    while queue and len(done) < GUIDED_STATES:
        _, _, path, spent, state = heappop(queue)
        if state in done:
            continue
        done.add(state)
        for cost, move in _moves(problem, state):
            after = move.apply(state)
            if after in done or spent + cost >= best:
                continue
            path_after, spent_after = (*path, move), spent + cost
            rest = _plain_route(problem, after)
            total = spent_after + _total(problem, after.lists, rest)
            if total < best:
                best, path_to_goal = total, path_after + rest
            heappush(queue, (total, len(path_after), path_after, spent_after, after))
    return best, path_to_goal


def _exact_search(problem: Problem, limit: int) -> Path | None:
    """The cheapest route; None if all cost more than `limit`, or after `EXACT_STATES` states."""
    goal, target_size = problem.goal, problem.local_size(problem.target)
    done: set[State] = set()
    queue: list[tuple[int, int, Path, int, State]] = [(0, 0, (), 0, problem.start)]
    while queue and len(done) < EXACT_STATES:
        _, _, path, spent, state = heappop(queue)
        if state == goal:
            return path
        if state in done:
            continue
        done.add(state)
        for cost, move in _moves(problem, state):
            after = move.apply(state)
            local_size = problem.local_size(after.lists)
            bound = spent + cost + _lower_bound(problem, local_size, target_size)
            if bound <= limit and after not in done:
                heappush(queue, (bound, len(path) + 1, (*path, move), spent + cost, after))
    return None


def _lower_bound(problem: Problem, local_size: int, target_size: int) -> int:
    """A lower bound on the cost from a local size to that of the target.

    To grow by n elements a device must receive n, and on average send n. To shrink costs the same
    in the backward pass.
    """
    if problem.differentiable:
        return abs(target_size - local_size)
    return max(0, target_size - local_size)


def _cost(problem: Problem, move: Move, local_size: int) -> int:
    """The data that one device sends in a move, forward and, if differentiable, backward."""
    group, spec = problem.num_shards(move.axes), COLLECTIVES[KINDS[move.kind]]
    larger = group * local_size if move.kind == ALL_GATHER else local_size
    cost = 0 if spec.local else spec.sent(larger, group)
    if problem.differentiable and (backward := spec.backward_of(move.varying)) is not None:
        cost += COLLECTIVES[backward].sent(larger, group)
    return cost


def _moves(problem: Problem, state: State) -> list[tuple[int, Move]]:
    """The moves from `state` that may be part of a cheapest route, with their costs.

    Settled axes stay. A slice that settles an axis is the only move, since it makes all others
    cheaper; so is, if many axes move, a reduce-scatter, which is nearly always right.
    """
    local_size = problem.local_size(state.lists)
    settled = _settled(state.lists, problem.target)
    sharded = frozenset(axis for axes in state.lists for axis in axes)
    free = frozenset(range(len(problem.sizes))) - sharded - state.partial - state.varying
    sharding_moves = list(_sharding_moves(problem, state, free))
    greedy = problem.differentiable and len(problem.sizes) > ALL_MOVES_AXES
    for kind in (SLICE, REDUCE_SCATTER) if greedy else (SLICE,):
        for move in sharding_moves:
            if move.kind == kind and _settles(problem, move):
                return [(_cost(problem, move, local_size), move)]
    moves = sharding_moves
    moves += _gathering_moves(problem, state, settled)
    partial = sorted(state.partial)
    for length in range(1, len(partial) + 1):
        for axes in combinations(partial, length):
            moves.append(Move(ALL_REDUCE, -1, -1, axes, state.lists))
    if varying := tuple(sorted(free & problem.varying)):
        moves.append(Move(VARY, -1, -1, varying, state.lists, varying=True))
    for lists in _permuted(problem, state.lists, settled, sharded | free):
        moves.append(Move(PERMUTE, -1, -1, (), lists))
    return [(_cost(problem, move, local_size), move) for move in moves]


def _settles(problem: Problem, move: Move) -> bool:
    """Whether all axes of the dimension are settled after a slice or reduce-scatter."""
    axes = move.lists[move.dim]
    return axes == problem.target[move.dim][: len(axes)]


def _settled(lists: Lists, target: Lists) -> tuple[int, ...]:
    """The number of settled axes of each dimension."""
    return tuple(map(common_length, lists, target))


def _divides(problem: Problem, dim: int, axes: Axes) -> bool:
    return problem.capacities[dim] % problem.num_shards(axes) == 0


def _with(lists: Lists, dim: int, axes: Axes) -> Lists:
    return (*lists[:dim], axes, *lists[dim + 1 :])


def _sharding_moves(problem: Problem, state: State, free: frozenset[int]) -> Iterator[Move]:
    """Slices and reduce-scatters over `problem.runs`, the longest first."""
    for dim, axes in enumerate(state.lists):
        for run in problem.runs[dim]:
            sliced = free.issuperset(run)
            if (sliced or state.partial.issuperset(run)) and _divides(problem, dim, axes + run):
                lists = _with(state.lists, dim, axes + run)
                yield Move(SLICE if sliced else REDUCE_SCATTER, dim, -1, run, lists)


def _gathering_moves(problem: Problem, state: State, settled: Axes) -> Iterator[Move]:
    """All-gathers and all-to-alls of the last axes of a dimension that are not settled."""
    anywhere = len(problem.sizes) <= ALL_MOVES_AXES
    for dim, axes in enumerate(state.lists):
        for begin in range(settled[dim], len(axes)):
            suffix = axes[begin:]
            rest = _with(state.lists, dim, axes[:begin])
            varying = problem.varying.intersection(suffix)
            if not varying or len(varying) == len(suffix):
                yield Move(ALL_GATHER, dim, -1, suffix, rest, bool(varying))
            for to_dim, to_axes in enumerate(state.lists):
                useful = anywhere or not problem.target_axes[to_dim].isdisjoint(suffix)
                if to_dim != dim and useful and _divides(problem, to_dim, to_axes + suffix):
                    lists = _with(rest, to_dim, to_axes + suffix)
                    yield Move(ALL_TO_ALL, dim, to_dim, suffix, lists)


def _permuted(
    problem: Problem, lists: Lists, settled: Axes, axes: frozenset[int]
) -> Iterator[Lists]:
    """Other axes for the same numbers of shards; with many axes only such that settle more."""
    if len(problem.sizes) > EXACT_AXES:
        counts = [problem.num_shards(dim) for dim in lists]
        available = axes.issuperset(axis for dim in problem.target for axis in dim)
        if available and counts == [problem.num_shards(dim) for dim in problem.target]:
            yield problem.target
        return
    fixed = tuple(dim[:length] for dim, length in zip(lists, settled, strict=True))
    unsettled = tuple(dim[length:] for dim, length in zip(lists, settled, strict=True))
    movable = axes.difference(*fixed)
    for replacements in _equal_count_lists(problem.sizes, unsettled, movable):
        permuted = tuple(map(add, fixed, replacements))
        settles_more = any(map(gt, _settled(permuted, problem.target), settled))
        if settles_more or len(problem.sizes) <= ALL_MOVES_AXES:
            yield permuted


@lru_cache(maxsize=1 << 14)
def _equal_count_lists(sizes: Axes, lists: Lists, axes: frozenset[int]) -> tuple[Lists, ...]:
    """All other assignments of `axes` to dimensions with the numbers of shards of `lists`."""

    def sequences(count: int, available: frozenset[int]) -> Iterator[Axes]:
        if count == 1:
            yield ()
            return
        for axis in sorted(available):
            if sizes[axis] > 1 and count % sizes[axis] == 0:
                for rest in sequences(count // sizes[axis], available - {axis}):
                    yield (axis, *rest)

    def assignments(counts: tuple[int, ...], available: frozenset[int]) -> Iterator[Lists]:
        if not counts:
            yield ()
            return
        for chosen in sequences(counts[0], available):
            for rest in assignments(counts[1:], available.difference(chosen)):
                yield (chosen, *rest)

    counts = tuple(prod([sizes[axis] for axis in dim]) for dim in lists)
    return tuple(assigned for assigned in assignments(counts, axes) if assigned != lists)


def _plain_route(problem: Problem, state: State) -> Path:
    """All-reduce, all-gather what is not settled, slice: always possible, seldom cheap."""
    moves, lists = [], state.lists
    settled = _settled(lists, problem.target)
    if state.partial:
        moves.append(Move(ALL_REDUCE, -1, -1, tuple(sorted(state.partial)), lists))
    for dim, keep in enumerate(settled):
        while len(axes := lists[dim]) > keep:
            # One gather per run of axes that are alike in being varying: its gradient differs.
            begin, varying = len(axes) - 1, axes[-1] in problem.varying
            while begin > keep and (axes[begin - 1] in problem.varying) == varying:
                begin -= 1
            lists = _with(lists, dim, axes[:begin])
            moves.append(Move(ALL_GATHER, dim, -1, axes[begin:], lists, varying))
    for dim, axes in enumerate(problem.target):
        if len(axes) > settled[dim]:
            lists = _with(lists, dim, axes)
            moves.append(Move(SLICE, dim, -1, axes[settled[dim] :], lists))
    gathered = {axis for axes in state.lists for axis in axes}
    if replicated := tuple(sorted(problem.varying - gathered - state.varying)):
        moves.append(Move(VARY, -1, -1, replicated, lists, varying=True))
    return tuple(moves)


def _total(problem: Problem, lists: Lists, moves: Path) -> int:
    """The total cost of `moves` from a state with these `lists`."""
    total = 0
    for move in moves:
        total += _cost(problem, move, problem.local_size(lists))
        lists = move.lists
    return total

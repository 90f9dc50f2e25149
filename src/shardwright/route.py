"""The cheapest way from one placement of a tensor to another. No torch in here.

Axes that move together are one axis here, dimensions and parts of a placement that stay as they are
do not appear. A state is where each of the remaining axes stands; a move is one collective, or the
local operation whose gradient is one. Its cost is what one device sends (see `conversion.Step`), in
a unit that is the same for all moves of a problem and leaves every cost an integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import combinations
from math import prod
from typing import NamedTuple

Axes = tuple[int, ...]
Lists = tuple[Axes, ...]

# In the order in which moves of equal cost are taken.
KINDS = (
    "slice",
    "reduce_scatter",
    "permute",
    "all_to_all",
    "all_reduce",
    "vary",
    "all_gather",
)
SLICE, REDUCE_SCATTER, PERMUTE, ALL_TO_ALL, ALL_REDUCE, VARY, ALL_GATHER = range(len(KINDS))

# Above this number of axes that move apart, permutes lead to the target's order only.
FULL_RELABELLING = 5
# States whose moves are tried before the search is content with the best way known.
MAX_EXPANSIONS = 1500


class State(NamedTuple):
    """The axes that cut each dimension, most significant first; partial and varying ones."""

    lists: Lists
    partial: frozenset[int]
    varying: frozenset[int]


class Move(NamedTuple):
    """One step; compared as a tuple where costs tie, so that ways are always the same ones."""

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


@dataclass(frozen=True)
class Problem:
    """Where each axis stands and shall stand.

    Args:
        sizes: devices along each axis.
        source, target: for each dimension the axes that cut it.
        partial: axes that hold terms of a sum in the source.
        varying: axes that shall be varying in the target.
        capacities: for each dimension the number that its number of parts must divide.
        differentiable: whether the cost counts the backward pass.
    """

    sizes: tuple[int, ...]
    source: Lists
    target: Lists
    partial: frozenset[int]
    varying: frozenset[int]
    capacities: tuple[int, ...]
    differentiable: bool

    @cached_property
    def whole(self) -> int:
        """The size of the tensor in units of cost: any local size divides by any group size."""
        return prod(self.sizes) ** 2

    def parts(self, axes: Axes) -> int:
        return prod([self.sizes[axis] for axis in axes])

    def local(self, lists: Lists) -> int:
        return self.whole // prod([self.parts(axes) for axes in lists])

    @property
    def start(self) -> State:
        return State(self.source, self.partial, frozenset())

    @property
    def goal(self) -> State:
        return State(self.target, frozenset(), self.varying)


@lru_cache(maxsize=1 << 16)
def route(problem: Problem) -> tuple[Move, ...]:
    """The cheapest moves from `problem`'s source to its target: fewest bytes, then fewest moves.

    A best-first search. What it can find is bounded by a plain way (reduce, gather, slice), which
    it returns where nothing better was found within `MAX_EXPANSIONS` states.
    """
    plain = _plain_route(problem)
    limit = _total(problem, plain)
    goal, wanted = problem.goal, problem.local(problem.target)
    done: set[State] = set()
    queue: list[tuple[int, int, tuple[Move, ...], int, State]] = []
    heappush(queue, (0, 0, (), 0, problem.start))
    while queue and len(done) < MAX_EXPANSIONS:
        _, _, path, spent, state = heappop(queue)
        if state == goal:
            return path
        if state in done:
            continue
        done.add(state)
        for cost, move in _moves(problem, state):
            after = move.apply(state)
            if after in done:
                continue
            bound = spent + cost + _least(problem, problem.local(after.lists), wanted)
            if bound <= limit:
                entry = (bound, len(path) + 1, (*path, move), spent + cost, after)
                heappush(queue, entry)
    return plain


def _least(problem: Problem, local: int, wanted: int) -> int:
    """No way costs less: to grow by n elements one must receive, hence send, n; a slice has that
    cost in its gradient."""
    return abs(wanted - local) if problem.differentiable else max(0, wanted - local)


def _cost(problem: Problem, move: Move, local: int) -> int:
    """What one device sends, forward and, if differentiable, backward; `local` elements before."""
    parts = problem.parts(move.axes)
    ring = (parts - 1) * local // parts
    forward, backward = {
        SLICE: (0, ring),
        REDUCE_SCATTER: (ring, ring),
        PERMUTE: (local, local),
        ALL_TO_ALL: (ring, ring),
        ALL_REDUCE: (2 * ring, 0),
        VARY: (0, 2 * ring),
        ALL_GATHER: ((parts - 1) * local, (parts - 1) * local if move.varying else 0),
    }[move.kind]
    return forward + backward if problem.differentiable else forward


def _moves(problem: Problem, state: State) -> Iterator[tuple[int, Move]]:
    """Every move from `state` with its cost."""
    local = problem.local(state.lists)
    placed = frozenset(axis for axes in state.lists for axis in axes)
    free = frozenset(range(len(problem.sizes))) - placed - state.partial - state.varying

    def priced(move: Move) -> tuple[int, Move]:
        return _cost(problem, move, local), move

    for move in _cutting_moves(problem, state, free):
        yield priced(move)
    for move in _moves_of_suffixes(problem, state):
        yield priced(move)
    partial = sorted(state.partial)
    for length in range(1, len(partial) + 1):
        for axes in combinations(partial, length):
            yield priced(Move(ALL_REDUCE, -1, -1, axes, state.lists))
    if varying := tuple(sorted(free & problem.varying)):
        yield priced(Move(VARY, -1, -1, varying, state.lists, varying=True))
    for lists in _relabelled(problem, state.lists, placed | free):
        yield priced(Move(PERMUTE, -1, -1, (), lists))


def _fits(problem: Problem, dim: int, axes: Axes) -> bool:
    return problem.capacities[dim] % problem.parts(axes) == 0


def _with(lists: Lists, dim: int, axes: Axes) -> Lists:
    return (*lists[:dim], axes, *lists[dim + 1 :])


def _cutting_moves(problem: Problem, state: State, free: frozenset[int]) -> Iterator[Move]:
    """Slices and reduce-scatters of axes that the target has in that dimension."""
    for dim, wanted in enumerate(problem.target):
        for begin in range(len(wanted)):
            for end in range(begin + 1, len(wanted) + 1):
                run = wanted[begin:end]
                lists = _with(state.lists, dim, state.lists[dim] + run)
                if not _fits(problem, dim, lists[dim]):
                    break
                if free.issuperset(run):
                    yield Move(SLICE, dim, -1, run, lists)
                elif state.partial.issuperset(run):
                    yield Move(REDUCE_SCATTER, dim, -1, run, lists)


def _moves_of_suffixes(problem: Problem, state: State) -> Iterator[Move]:
    """Gathers and all-to-alls of what cuts a dimension most finely."""
    for dim, axes in enumerate(state.lists):
        for begin in range(len(axes)):
            suffix = axes[begin:]
            rest = _with(state.lists, dim, axes[:begin])
            varying = problem.varying.intersection(suffix)
            if not varying or len(varying) == len(suffix):
                yield Move(ALL_GATHER, dim, -1, suffix, rest, bool(varying))
            for to_dim, entered in enumerate(state.lists):
                if to_dim != dim and _fits(problem, to_dim, entered + suffix):
                    lists = _with(rest, to_dim, entered + suffix)
                    yield Move(ALL_TO_ALL, dim, to_dim, suffix, lists)


def _relabelled(problem: Problem, lists: Lists, axes: frozenset[int]) -> tuple[Lists, ...]:
    """The other ways to cut each dimension in as many parts, by any of these axes."""
    if len(problem.sizes) <= FULL_RELABELLING:
        return _relabellings(problem.sizes, lists, axes)
    counts = [problem.parts(axes) for axes in lists]
    wanted = [problem.parts(axes) for axes in problem.target]
    reached = axes.issuperset(axis for dim in problem.target for axis in dim)
    return (problem.target,) if reached and counts == wanted and lists != problem.target else ()


@lru_cache(maxsize=1 << 14)
def _relabellings(sizes: Axes, lists: Lists, axes: frozenset[int]) -> tuple[Lists, ...]:
    def sequences(parts: int, left: frozenset[int]) -> Iterator[Axes]:
        if parts == 1:
            yield ()
            return
        for axis in sorted(left):
            if sizes[axis] > 1 and parts % sizes[axis] == 0:
                for rest in sequences(parts // sizes[axis], left - {axis}):
                    yield (axis, *rest)

    def assignments(counts: tuple[int, ...], left: frozenset[int]) -> Iterator[Lists]:
        if not counts:
            yield ()
            return
        for chosen in sequences(counts[0], left):
            for rest in assignments(counts[1:], left.difference(chosen)):
                yield (chosen, *rest)

    counts = tuple(prod([sizes[axis] for axis in dim]) for dim in lists)
    return tuple(found for found in assignments(counts, axes) if found != lists)


def _plain_route(problem: Problem) -> tuple[Move, ...]:
    """Reduce, gather everything, slice: always possible, seldom cheap."""
    moves, lists = [], problem.source
    if problem.partial:
        moves.append(Move(ALL_REDUCE, -1, -1, tuple(sorted(problem.partial)), lists))
    for dim in range(len(lists)):
        while axes := lists[dim]:
            begin, varying = len(axes) - 1, axes[-1] in problem.varying
            while begin and (axes[begin - 1] in problem.varying) == varying:
                begin -= 1
            lists = _with(lists, dim, axes[:begin])
            moves.append(Move(ALL_GATHER, dim, -1, axes[begin:], lists, varying))
    for dim, axes in enumerate(problem.target):
        if axes:
            lists = _with(lists, dim, axes)
            moves.append(Move(SLICE, dim, -1, axes, lists))
    gathered = {axis for axes in problem.source for axis in axes}
    if left := tuple(sorted(problem.varying - gathered)):
        moves.append(Move(VARY, -1, -1, left, lists, varying=True))
    return tuple(moves)


def _total(problem: Problem, moves: tuple[Move, ...]) -> int:
    total, lists = 0, problem.source
    for move in moves:
        total += _cost(problem, move, problem.local(lists))
        lists = move.lists
    return total

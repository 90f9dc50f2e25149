"""The cheapest way from one placement of a tensor to another. No torch in here.

Axes that move together are one axis here, dimensions and parts of a placement that stay as they are
do not appear. A state is where each of the remaining axes stands; a move is one collective, or the
local operation whose gradient is one. Its cost is what one device sends (see `CollectiveSpec`), in
a unit that is the same for all moves of a problem and leaves every cost an integer.
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

# Up to this number of axes that move apart the cheapest way is searched for: among all moves up to
# the first number, among those that bring an axis to its dimension up to the second.
ALL_MOVES_AXES, EXACT_AXES = 3, 4
# States whose moves are tried in the search for a good way, and in that for the cheapest.
GUIDED_STATES, EXACT_STATES = 24, 4000


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


Path = tuple[Move, ...]


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

    @cached_property
    def homes(self) -> tuple[frozenset[int], ...]:
        """The axes that the target has in each dimension, in any order."""
        return tuple(map(frozenset, self.target))

    @cached_property
    def runs(self) -> tuple[Lists, ...]:
        """What may come to cut each dimension: runs of the target's axes, the longest first.

        Other axes too where all moves are tried: a permute may put them right.
        """
        choices = []
        for wanted in self.target:
            ends = range(len(wanted), 0, -1)
            runs = [wanted[begin:end] for end in ends for begin in range(end)]
            if len(self.sizes) <= ALL_MOVES_AXES:
                runs += [(axis,) for axis in range(len(self.sizes)) if axis not in wanted]
            choices.append(tuple(sorted(runs, key=len, reverse=True)))
        return tuple(choices)

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
def route(problem: Problem) -> Path:
    """The cheapest moves from `problem`'s source to its target: fewest bytes, then fewest moves.

    Two best-first searches. The first takes the states from which the plain way (reduce, gather,
    slice) ends cheapest; so it is never dearer than that. The second bounds what is left from
    below and is therefore exact; it is made where at most `EXACT_AXES` axes move apart.
    """
    path = _plain_route(problem, problem.start)
    spent = _total(problem, problem.source, path)
    if len(problem.sizes) > 2:
        spent, path = _guided(problem, spent, path)
    if len(problem.sizes) <= EXACT_AXES:
        path = _cheapest(problem, spent) or path
    return path


def _guided(problem: Problem, best: int, path_to_goal: Path) -> tuple[int, Path]:
    """The best way seen on trying `GUIDED_STATES` promising states, and its cost."""
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
            way, reached = (*path, move), spent + cost
            rest = _plain_route(problem, after)
            total = reached + _total(problem, after.lists, rest)
            if total < best:
                best, path_to_goal = total, way + rest
            heappush(queue, (total, len(way), way, reached, after))
    return best, path_to_goal


def _cheapest(problem: Problem, limit: int) -> Path | None:
    """The cheapest way; None if none costs `limit` or less, or too many states would be tried."""
    goal, wanted = problem.goal, problem.local(problem.target)
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
            bound = spent + cost + _least(problem, problem.local(after.lists), wanted)
            if bound <= limit and after not in done:
                heappush(queue, (bound, len(path) + 1, (*path, move), spent + cost, after))
    return None


def _least(problem: Problem, local: int, wanted: int) -> int:
    """No way costs less: to grow by n elements one must receive, hence send, n; a slice has that
    cost in its gradient."""
    return abs(wanted - local) if problem.differentiable else max(0, wanted - local)


def _cost(problem: Problem, move: Move, local: int) -> int:
    """What one device sends, forward and, if differentiable, backward; `local` elements before."""
    parts, spec = problem.parts(move.axes), COLLECTIVES[KINDS[move.kind]]
    larger = parts * local if move.kind == ALL_GATHER else local
    cost = 0 if spec.local else spec.sent(larger, parts)
    if problem.differentiable and (backward := spec.backward_of(move.varying)) is not None:
        cost += COLLECTIVES[backward].sent(larger, parts)
    return cost


def _moves(problem: Problem, state: State) -> list[tuple[int, Move]]:
    """The moves from `state` that may lie on a cheapest way, with their costs.

    Axes that stand where the target has them stay there. To put one there by a slice is right
    before anything else, since it makes everything else cheaper; so is, nearly always, a
    reduce-scatter.
    """
    local = problem.local(state.lists)
    settled = _settled(state.lists, problem.target)
    placed = frozenset(axis for axes in state.lists for axis in axes)
    free = frozenset(range(len(problem.sizes))) - placed - state.partial - state.varying
    cuts = list(_cutting_moves(problem, state, free))
    eager = problem.differentiable and len(problem.sizes) > ALL_MOVES_AXES
    for kind in (SLICE, REDUCE_SCATTER) if eager else (SLICE,):
        for move in cuts:
            if move.kind == kind and _settles(problem, move):
                return [(_cost(problem, move, local), move)]
    moves = cuts
    moves += _moves_of_suffixes(problem, state, settled)
    partial = sorted(state.partial)
    for length in range(1, len(partial) + 1):
        for axes in combinations(partial, length):
            moves.append(Move(ALL_REDUCE, -1, -1, axes, state.lists))
    if varying := tuple(sorted(free & problem.varying)):
        moves.append(Move(VARY, -1, -1, varying, state.lists, varying=True))
    for lists in _relabeled(problem, state.lists, settled, placed | free):
        moves.append(Move(PERMUTE, -1, -1, (), lists))
    return [(_cost(problem, move, local), move) for move in moves]


def _settles(problem: Problem, move: Move) -> bool:
    """Whether all that cuts the dimension after a slice or reduce-scatter is settled."""
    axes = move.lists[move.dim]
    return axes == problem.target[move.dim][: len(axes)]


def _settled(lists: Lists, target: Lists) -> tuple[int, ...]:
    """For each dimension how many of its first axes stand where the target has them."""
    return tuple(map(common_length, lists, target))


def _fits(problem: Problem, dim: int, axes: Axes) -> bool:
    return problem.capacities[dim] % problem.parts(axes) == 0


def _with(lists: Lists, dim: int, axes: Axes) -> Lists:
    return (*lists[:dim], axes, *lists[dim + 1 :])


def _cutting_moves(problem: Problem, state: State, free: frozenset[int]) -> Iterator[Move]:
    """Slices and reduce-scatters: of what the target has in that dimension, longest first."""
    for dim, here in enumerate(state.lists):
        for run in problem.runs[dim]:
            sliced = free.issuperset(run)
            if (sliced or state.partial.issuperset(run)) and _fits(problem, dim, here + run):
                lists = _with(state.lists, dim, here + run)
                yield Move(SLICE if sliced else REDUCE_SCATTER, dim, -1, run, lists)


def _moves_of_suffixes(problem: Problem, state: State, settled: Axes) -> Iterator[Move]:
    """Gathers and all-to-alls of what is not settled."""
    anywhere = len(problem.sizes) <= ALL_MOVES_AXES
    for dim, axes in enumerate(state.lists):
        for begin in range(settled[dim], len(axes)):
            suffix = axes[begin:]
            rest = _with(state.lists, dim, axes[:begin])
            varying = problem.varying.intersection(suffix)
            if not varying or len(varying) == len(suffix):
                yield Move(ALL_GATHER, dim, -1, suffix, rest, bool(varying))
            for to_dim, entered in enumerate(state.lists):
                home = anywhere or not problem.homes[to_dim].isdisjoint(suffix)
                if to_dim != dim and home and _fits(problem, to_dim, entered + suffix):
                    lists = _with(rest, to_dim, entered + suffix)
                    yield Move(ALL_TO_ALL, dim, to_dim, suffix, lists)


def _relabeled(
    problem: Problem, lists: Lists, settled: Axes, axes: frozenset[int]
) -> Iterator[Lists]:
    """Other ways to cut each dimension in as many parts; that settle more, where axes are many."""
    if len(problem.sizes) > EXACT_AXES:
        counts = [problem.parts(dim) for dim in lists]
        reached = axes.issuperset(axis for dim in problem.target for axis in dim)
        if reached and counts == [problem.parts(dim) for dim in problem.target]:
            yield problem.target
        return
    fixed = tuple(dim[:length] for dim, length in zip(lists, settled, strict=True))
    loose = tuple(dim[length:] for dim, length in zip(lists, settled, strict=True))
    movable = axes.difference(*fixed)
    for loose_lists in _relabelings(problem.sizes, loose, movable):
        relabeled = tuple(map(add, fixed, loose_lists))
        better = any(map(gt, _settled(relabeled, problem.target), settled))
        if better or len(problem.sizes) <= ALL_MOVES_AXES:
            yield relabeled


@lru_cache(maxsize=1 << 14)
def _relabelings(sizes: Axes, lists: Lists, axes: frozenset[int]) -> tuple[Lists, ...]:
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
    return tuple(relabeled for relabeled in assignments(counts, axes) if relabeled != lists)


def _plain_route(problem: Problem, state: State) -> Path:
    """Reduce, gather what is not settled, slice: always possible, seldom cheap."""
    moves, lists = [], state.lists
    settled = _settled(lists, problem.target)
    if state.partial:
        moves.append(Move(ALL_REDUCE, -1, -1, tuple(sorted(state.partial)), lists))
    for dim, keep in enumerate(settled):
        while len(axes := lists[dim]) > keep:
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
    if left := tuple(sorted(problem.varying - gathered - state.varying)):
        moves.append(Move(VARY, -1, -1, left, lists, varying=True))
    return tuple(moves)


def _total(problem: Problem, lists: Lists, moves: Path) -> int:
    """What `moves` cost together from a state with these `lists`."""
    total = 0
    for move in moves:
        total += _cost(problem, move, problem.local(lists))
        lists = move.lists
    return total

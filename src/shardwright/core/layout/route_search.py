"""Search for the cheapest route, a sequence of collectives, from one layout to another.

Does not import torch. The words of this module:

- A *problem* is a redistribution without the axes and dimensions that do not change; axes that move
  together are one axis.
- A *state* is the list of axes that shard each dimension, with the partial and the varying axes.
- A *move* leads from one state to another: a collective, or a local operation whose gradient needs
  a collective. Its cost is the data that one device sends (see `CollectiveSpec`), in a unit in
  which all costs of a problem are integers.
- A *route* (or path) is a sequence of moves from the source to the target.
- An axis is *settled* if it and all axes before it shard the dimension as in the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations
from math import prod
from operator import add, gt

from shardwright.core.layout.axes import Axes, common_length
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.route_problem import (
    ALL_GATHER,
    ALL_MOVES_AXES,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXACT_AXES,
    KINDS,
    PERMUTE,
    REDUCE_SCATTER,
    SLICE,
    VARY,
    AxesByDim,
    Move,
    Path,
    Problem,
    State,
)

# Largest numbers of states that the heuristic and the exact search expand.
HEURISTIC_STATES, EXACT_STATES = 24, 4000


@lru_cache(maxsize=1 << 16)
def route(problem: Problem) -> Path:
    """Find the cheapest moves from the source to the target: fewest bytes, then fewest moves.

    Runs two best-first searches. The first is a heuristic that orders states by the total cost with
    the plain route (all-reduce, all-gather, slice) to the target; its result costs at most as much
    as the plain route. The second is A* with a lower bound on the remaining cost, and therefore
    exact; it runs if at most `EXACT_AXES` axes move, with the cost of the first search's route as
    upper bound.
    """
    path = _build_plain_route(problem, problem.start)
    cost = _sum_move_costs(problem, problem.source, path)
    # With one or two axes the plain route is a good enough upper bound for the exact search.
    if len(problem.sizes) > 2:
        cost, path = _search_heuristically(problem, cost, path)
    if len(problem.sizes) <= EXACT_AXES:
        path = _search_exactly(problem, cost) or path
    return path


def _search_heuristically(problem: Problem, best_cost: int, best_path: Path) -> tuple[int, Path]:
    """Improve a route by expanding up to `HEURISTIC_STATES` states.

    Args:
        problem: the problem to solve.
        best_cost, best_path: cost and moves of the route to improve.

    Returns:
        The cost and the moves of the best route found.
    """
    expanded: set[State] = set()
    # Entries are (total cost with the plain route, moves, path, cost of the path, state).
    queue: list[tuple[int, int, Path, int, State]] = [(best_cost, 0, (), 0, problem.start)]
    while queue and len(expanded) < HEURISTIC_STATES:
        _, _, path, path_cost, state = heappop(queue)
        if state in expanded:
            continue
        expanded.add(state)
        for cost, move in _find_candidate_moves(problem, state):
            next_state = move.apply(state)
            # What follows costs at least 0, so a path that costs as much as the best route cannot
            # improve it.
            if next_state in expanded or path_cost + cost >= best_cost:
                continue
            next_path, next_cost = (*path, move), path_cost + cost
            remaining_path = _build_plain_route(problem, next_state)
            total = next_cost + _sum_move_costs(problem, next_state.axes_by_dim, remaining_path)
            if total < best_cost:
                best_cost, best_path = total, next_path + remaining_path
            heappush(queue, (total, len(next_path), next_path, next_cost, next_state))
    return best_cost, best_path


def _search_exactly(problem: Problem, limit: int) -> Path | None:
    """Find the cheapest route by A*.

    Returns None if all routes cost more than `limit`, or after `EXACT_STATES` expanded states.
    """
    goal, target_size = problem.goal, problem.local_size(problem.target)
    expanded: set[State] = set()
    # Entries are (lower bound on the total cost, moves, path, cost of the path, state). The bound
    # of the only first entry does not matter.
    queue: list[tuple[int, int, Path, int, State]] = [(0, 0, (), 0, problem.start)]
    while queue and len(expanded) < EXACT_STATES:
        _, _, path, path_cost, state = heappop(queue)
        # Tested when taken from the queue: at insertion a cheaper path may still be ahead.
        if state == goal:
            return path
        # Several paths may lead to a state; the first one taken from the queue is the cheapest.
        if state in expanded:
            continue
        expanded.add(state)
        for cost, move in _find_candidate_moves(problem, state):
            next_state = move.apply(state)
            local_size = problem.local_size(next_state.axes_by_dim)
            bound = path_cost + cost + _bound_remaining_cost(problem, local_size, target_size)
            # `<=`, so that a route with the cost of the limit but fewer moves is found too.
            if bound <= limit and next_state not in expanded:
                heappush(queue, (bound, len(path) + 1, (*path, move), path_cost + cost, next_state))
    return None


def _bound_remaining_cost(problem: Problem, local_size: int, target_size: int) -> int:
    """Return a lower bound on the cost of moves that change the local size to that of the target.

    To grow by n elements, a device must receive n elements, and devices on average send as many as
    they receive. Shrinking by n elements costs the same in the backward pass.
    """
    if problem.differentiable:
        return abs(target_size - local_size)
    return max(0, target_size - local_size)


def _compute_move_cost(problem: Problem, move: Move, local_size: int) -> int:
    """Return the communication volume of a move, in the forward and, if differentiable, the
    backward pass."""
    group, spec = problem.num_shards(move.axes), COLLECTIVES[KINDS[move.operation]]
    # An all-gather multiplies the local size; all other kinds start from the larger size. A permute
    # has no axes, but sends the local tensor whatever its group is.
    larger = group * local_size if move.operation == ALL_GATHER else local_size
    cost = 0 if spec.local else spec.sent_volume(larger, group)
    if problem.differentiable and (backward := spec.backward_of(move.varying)) is not None:
        cost += COLLECTIVES[backward].sent_volume(larger, group)
    return cost


def _find_candidate_moves(problem: Problem, state: State) -> list[tuple[int, Move]]:
    """Return (cost, move) of each move from a state that may be part of a cheapest route.

    No move changes settled axes. If a slice settles its axes, it is the only candidate, since it
    makes all other moves cheaper. In differentiable problems of more than `ALL_MOVES_AXES` axes the
    same holds for a reduce-scatter, which is nearly always best.
    """
    local_size = problem.local_size(state.axes_by_dim)
    settled = _count_settled_axes(state.axes_by_dim, problem.target)
    sharded = frozenset(axis for axes in state.axes_by_dim for axis in axes)
    free = frozenset(range(len(problem.sizes))) - sharded - state.partial - state.varying
    sharding_moves = list(_iterate_sharding_moves(problem, state, free))
    greedy = problem.differentiable and len(problem.sizes) > ALL_MOVES_AXES
    for operation in (SLICE, REDUCE_SCATTER) if greedy else (SLICE,):
        for move in sharding_moves:
            if move.operation == operation and _reaches_target_prefix(problem, move):
                return [(_compute_move_cost(problem, move, local_size), move)]
    moves = sharding_moves
    moves += _iterate_gathering_moves(problem, state, settled)
    partial = sorted(state.partial)
    # All subsets: a reduce-scatter may be better for the other partial axes.
    for length in range(1, len(partial) + 1):
        for axes in combinations(partial, length):
            moves.append(Move(ALL_REDUCE, -1, -1, axes, state.axes_by_dim))
    # One move for all axes: one all-reduce of the gradient over two axes sends less than two.
    if varying := tuple(sorted(free & problem.varying)):
        moves.append(Move(VARY, -1, -1, varying, state.axes_by_dim, varying=True))
    for axes_by_dim in _iterate_axis_permutations(
        problem, state.axes_by_dim, settled, sharded | free
    ):
        moves.append(Move(PERMUTE, -1, -1, (), axes_by_dim))
    return [(_compute_move_cost(problem, move, local_size), move) for move in moves]


def _reaches_target_prefix(problem: Problem, move: Move) -> bool:
    """Whether the axes that shard `move.dim` after the move are the target's first axes there."""
    axes = move.axes_by_dim[move.dim]
    return axes == problem.target[move.dim][: len(axes)]


def _count_settled_axes(axes_by_dim: AxesByDim, target: AxesByDim) -> tuple[int, ...]:
    """Return the number of leading axes of each dimension that are already as in the target."""
    return tuple(map(common_length, axes_by_dim, target))


def _can_shard(problem: Problem, dim: int, axes: Axes) -> bool:
    return problem.capacities[dim] % problem.num_shards(axes) == 0


def _replace_axes(axes_by_dim: AxesByDim, dim: int, axes: Axes) -> AxesByDim:
    return (*axes_by_dim[:dim], axes, *axes_by_dim[dim + 1 :])


def _iterate_sharding_moves(problem: Problem, state: State, free: frozenset[int]) -> Iterator[Move]:
    """Yield slices and reduce-scatters along runs of axes (`problem.axis_runs`), the longest first.

    Args:
        problem: the problem to solve.
        state: the state before the move.
        free: the axes over which the tensor is replicated.
    """
    for dim, axes in enumerate(state.axes_by_dim):
        for run in problem.axis_runs[dim]:
            sliced = free.issuperset(run)
            # A run of replicated and of partial axes would need two collectives.
            if (sliced or state.partial.issuperset(run)) and _can_shard(problem, dim, axes + run):
                axes_by_dim = _replace_axes(state.axes_by_dim, dim, axes + run)
                yield Move(SLICE if sliced else REDUCE_SCATTER, dim, -1, run, axes_by_dim)


def _iterate_gathering_moves(problem: Problem, state: State, settled: Axes) -> Iterator[Move]:
    """Yield all-gathers and all-to-alls of trailing axes, except axes that shard as in the target.

    Args:
        problem: the problem to solve.
        state: the state before the move.
        settled: number of settled axes of each dimension.
    """
    tries_all_moves = len(problem.sizes) <= ALL_MOVES_AXES
    for dim, axes in enumerate(state.axes_by_dim):
        # Only trailing axes: gathering a leading axis would leave a strided set of blocks.
        for begin in range(settled[dim], len(axes)):
            suffix = axes[begin:]
            remaining_axes = _replace_axes(state.axes_by_dim, dim, axes[:begin])
            varying = problem.varying.intersection(suffix)
            # Mixed axes would need two gradients, a slice over some and a reduce-scatter over
            # others.
            if not varying or len(varying) == len(suffix):
                yield Move(ALL_GATHER, dim, -1, suffix, remaining_axes, bool(varying))
            for to_dim, to_axes in enumerate(state.axes_by_dim):
                # With many axes, only to a dimension that some of them shard in the target.
                useful = tries_all_moves or not problem.target_axes[to_dim].isdisjoint(suffix)
                if to_dim != dim and useful and _can_shard(problem, to_dim, to_axes + suffix):
                    axes_by_dim = _replace_axes(remaining_axes, to_dim, to_axes + suffix)
                    yield Move(ALL_TO_ALL, dim, to_dim, suffix, axes_by_dim)


def _iterate_axis_permutations(
    problem: Problem, axes_by_dim: AxesByDim, settled: Axes, axes: frozenset[int]
) -> Iterator[AxesByDim]:
    """Yield candidate permutes, as the axes that shard each dimension afterwards.

    A permute does not change the number of shards of a dimension. In problems of more than
    `ALL_MOVES_AXES` axes, only permutes that settle more axes are considered.

    Args:
        problem: the problem to solve.
        axes_by_dim: the axes that shard each dimension before the permute.
        settled: number of settled axes of each dimension.
        axes: the axes that may shard a dimension.
    """
    if len(problem.sizes) > EXACT_AXES:
        # Too many assignments to list: only the target itself is tried.
        counts = [problem.num_shards(dim) for dim in axes_by_dim]
        available = axes.issuperset(axis for dim in problem.target for axis in dim)
        if available and counts == [problem.num_shards(dim) for dim in problem.target]:
            yield problem.target
        return
    # Settled axes stay: no cheapest route moves them (`_find_candidate_moves`).
    fixed = tuple(dim[:length] for dim, length in zip(axes_by_dim, settled, strict=True))
    unsettled = tuple(dim[length:] for dim, length in zip(axes_by_dim, settled, strict=True))
    movable = axes.difference(*fixed)
    for replacements in _list_axis_assignments_with_equal_shard_counts(
        problem.sizes, unsettled, movable
    ):
        permuted = tuple(map(add, fixed, replacements))
        settles_more = any(map(gt, _count_settled_axes(permuted, problem.target), settled))
        if settles_more or len(problem.sizes) <= ALL_MOVES_AXES:
            yield permuted


@lru_cache(maxsize=1 << 14)
def _list_axis_assignments_with_equal_shard_counts(
    sizes: Axes, axes_by_dim: AxesByDim, axes: frozenset[int]
) -> tuple[AxesByDim, ...]:
    """Return all other assignments of axes to dimensions with the shard counts of `axes_by_dim`.

    Args:
        sizes: number of devices along each axis.
        axes_by_dim: the axes that shard each dimension.
        axes: the axes to assign.
    """

    def sequences(count: int, available: frozenset[int]) -> Iterator[Axes]:
        if count == 1:
            yield ()
            return
        for axis in sorted(available):
            # An axis of size 1 changes no count, but would multiply the assignments.
            if sizes[axis] > 1 and count % sizes[axis] == 0:
                for later_axes in sequences(count // sizes[axis], available - {axis}):
                    yield (axis, *later_axes)

    def assignments(counts: tuple[int, ...], available: frozenset[int]) -> Iterator[AxesByDim]:
        if not counts:
            yield ()
            return
        for chosen in sequences(counts[0], available):
            for later_dims in assignments(counts[1:], available.difference(chosen)):
                yield (chosen, *later_dims)

    counts = tuple(prod([sizes[axis] for axis in dim]) for dim in axes_by_dim)
    return tuple(assigned for assigned in assignments(counts, axes) if assigned != axes_by_dim)


def _build_plain_route(problem: Problem, state: State) -> Path:
    """Return the plain route: all-reduce, all-gathers of unsettled axes, slices.

    It always exists but is rarely the cheapest.
    """
    moves, axes_by_dim = [], state.axes_by_dim
    settled = _count_settled_axes(axes_by_dim, problem.target)
    if state.partial:
        moves.append(Move(ALL_REDUCE, -1, -1, tuple(sorted(state.partial)), axes_by_dim))
    for dim, num_settled in enumerate(settled):
        while len(axes := axes_by_dim[dim]) > num_settled:
            # One gather for consecutive axes that are all varying or all not, since the gradients
            # of the two gathers differ.
            begin, varying = len(axes) - 1, axes[-1] in problem.varying
            while begin > num_settled and (axes[begin - 1] in problem.varying) == varying:
                begin -= 1
            axes_by_dim = _replace_axes(axes_by_dim, dim, axes[:begin])
            moves.append(Move(ALL_GATHER, dim, -1, axes[begin:], axes_by_dim, varying))
    for dim, axes in enumerate(problem.target):
        if len(axes) > settled[dim]:
            axes_by_dim = _replace_axes(axes_by_dim, dim, axes)
            moves.append(Move(SLICE, dim, -1, axes[settled[dim] :], axes_by_dim))
    # The all-gathers above have made the axes that they gather varying.
    gathered = {axis for axes in state.axes_by_dim for axis in axes}
    if replicated := tuple(sorted(problem.varying - gathered - state.varying)):
        moves.append(Move(VARY, -1, -1, replicated, axes_by_dim, varying=True))
    return tuple(moves)


def _sum_move_costs(problem: Problem, axes_by_dim: AxesByDim, moves: Path) -> int:
    """Return the total cost of consecutive moves.

    Args:
        problem: the problem to solve.
        axes_by_dim: the axes that shard each dimension before the first move.
        moves: the moves in order.
    """
    total = 0
    for move in moves:
        total += _compute_move_cost(problem, move, problem.local_size(axes_by_dim))
        axes_by_dim = move.axes_by_dim
    return total

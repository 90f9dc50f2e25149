"""Translate between redistributions of layouts and the route problems of `route_search`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod

from shardwright.core.layout import route_problem
from shardwright.core.layout.axes import (
    Axes,
    Shape,
    common_length,
)
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.layout.redistribution_step import RedistributionStep, strip_common_ends


@dataclass(frozen=True)
class RouteTranslation:
    """Conversion between a redistribution and the reduced problem that `route_search` solves.

    Args:
        mesh: the device matrix of both layouts.
        joined: for each axis of the reduced problem, the mesh axes that it represents.
        prefixes: the common leading axes of both layouts in each dimension, which do not change.
        dims: the dimensions in which the layouts differ.
    """

    mesh: DeviceMatrix
    joined: tuple[Axes, ...]
    prefixes: tuple[Axes, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, source: TensorLayout, target: TensorLayout) -> RouteTranslation:
        pairs = list(zip(source.axes, target.axes, strict=True))
        # The common leading axes divide the tensor into parts that are redistributed independently.
        prefixes = tuple(before[: common_length(before, after)] for before, after in pairs)
        # Other dimensions take no part, as a route over them would have to undo its changes.
        dims = tuple(dim for dim, (before, after) in enumerate(pairs) if before != after)
        joined = tuple(_group_redistributed_axes(source, target, prefixes))
        return cls(source.layout, joined, prefixes, dims)

    def problem(
        self, source: TensorLayout, target: TensorLayout, shape: Shape, differentiable: bool
    ) -> route_problem.Problem:
        """Return the search problem for the cheapest route from `source` to `target`."""
        sizes = tuple(self.mesh.size(axes) for axes in self.joined)
        # Axes of a group move together, so the first one identifies the group.
        problem_axis = {axes[0]: index for index, axes in enumerate(self.joined)}
        num_devices = prod(sizes)

        def to_problem(axes: Iterable[int]) -> Axes:
            return tuple(problem_axis[axis] for axis in axes if axis in problem_axis)

        # Sizes are reduced to their divisors of the number of devices, so that problems which
        # differ only in irrelevant sizes share a cache entry.
        local_sizes = (shape[dim] // self.mesh.size(self.prefixes[dim]) for dim in self.dims)
        return route_problem.Problem(
            sizes,
            tuple(to_problem(source.axes[dim]) for dim in self.dims),
            tuple(to_problem(target.axes[dim]) for dim in self.dims),
            # Axes over which the target stays partial take part in no move.
            frozenset(to_problem(source.partial - target.partial)),
            frozenset(to_problem(target.varying)),
            tuple(gcd(size, num_devices) for size in local_sizes),
            differentiable,
        )

    def mesh_axes(self, problem_axes: Iterable[int]) -> Axes:
        """Return the mesh axes that the given axes of the reduced problem represent, in order."""
        return tuple(axis for problem_axis in problem_axes for axis in self.joined[problem_axis])

    def layout_after(self, current: TensorLayout, move: route_problem.Move) -> TensorLayout:
        """Return the layout of a tensor after `move`, given its layout `current` before `move`."""
        axes = list(current.axes)
        for dim, problem_axes in zip(self.dims, move.axes_by_dim, strict=True):
            axes[dim] = self.prefixes[dim] + self.mesh_axes(problem_axes)
        # A permute has no axes, and leaves partial and varying ones as they are.
        moved = frozenset(self.mesh_axes(move.axes))
        reduces = move.operation in (route_problem.ALL_REDUCE, route_problem.REDUCE_SCATTER)
        return TensorLayout(
            self.mesh,
            tuple(axes),
            current.partial - moved if reduces else current.partial,
            current.varying | moved if move.varying else current.varying,
        )


def convert_move_to_step(
    move: route_problem.Move,
    translation: RouteTranslation,
    source: TensorLayout,
    target: TensorLayout,
) -> RedistributionStep:
    """Convert a move of the route search to the redistribution step from `source` to `target`."""
    axes = translation.mesh_axes(move.axes)
    if move.operation == route_problem.PERMUTE:
        pairs = zip(source.axes, target.axes, strict=True)
        # A permute of the route search names no axes: its group is all axes that change places.
        axes = tuple(
            sorted(
                {
                    a
                    for pair in pairs
                    for axes_of_dim in strip_common_ends(*pair)
                    for a in axes_of_dim
                }
            )
        )
    # These shard no dimension, so the order of their axes is free.
    elif move.operation in (route_problem.VARY, route_problem.ALL_REDUCE):
        axes = tuple(sorted(axes))
    dim = translation.dims[move.dim] if move.dim >= 0 else None
    to_dim = translation.dims[move.to_dim] if move.to_dim >= 0 else None
    return RedistributionStep(
        route_problem.KINDS[move.operation], axes, dim, to_dim, source, target
    )


def _group_redistributed_axes(
    source: TensorLayout, target: TensorLayout, prefixes: tuple[Axes, ...]
) -> list[Axes]:
    """Return the mesh axes that a redistribution moves, in groups that move together.

    Up to `ALL_MOVES_AXES` axes each are a group of their own. Of more axes, those that follow each
    other in both layouts are one group, which keeps the search of a route short.

    Args:
        source: the layout before the redistribution.
        target: the layout after it.
        prefixes: the common leading axes of each dimension, which do not move.
    """
    fixed = {axis for axes in prefixes for axis in axes}
    before, after = _compute_axis_states(source, fixed), _compute_axis_states(target, fixed)
    # An axis behind the common prefix moves even if its index stays the same, because only the last
    # axes of a dimension can be gathered or moved.
    moving = [a for a in before if before[a] != after[a] or before[a][1] is not None]

    # Few enough for an exact search, which joined axes would keep from parting them.
    if len(moving) <= route_problem.ALL_MOVES_AXES:
        return [(axis,) for axis in moving]

    def follows(axis: int, other: int) -> bool:
        """Whether `other` directly follows `axis` in a dimension of both layouts.

        Also true if both axes are partial, varying or unused in both layouts.
        """
        return all(
            state[axis][0] == state[other][0]
            and (state[axis][1] is None or state[other][1] == (state[axis][1] or 0) + 1)
            for state in (before, after)
        )

    # Partial and varying axes have no order in a layout: order them as in the other layout. `str`,
    # because a state is a dimension (int) or a name.
    moving.sort(
        key=lambda a: (str(before[a][0]), str(after[a][0]), before[a][1] or 0, after[a][1] or 0)
    )
    joined: list[Axes] = []
    for axis in moving:
        if joined and follows(joined[-1][-1], axis):
            joined[-1] = (*joined[-1], axis)
        else:
            joined.append((axis,))
    return joined


def _compute_axis_states(
    layout: TensorLayout, fixed: set[int]
) -> dict[int, tuple[int | str, int | None]]:
    """Return how a layout uses each axis of its device matrix, by index of the axis.

    An axis that shards a dimension has the entry (dimension, index among the dimension's axes).
    Other entries are ("fixed" | "partial" | "varying" | "", None); "" is a replicated axis.
    """
    states: dict[int, tuple[int | str, int | None]] = {}
    for axis in range(len(layout.device_matrix)):
        # Axes that shard a dimension are overwritten below.
        state = "partial" if axis in layout.partial else "varying" if axis in layout.varying else ""
        states[axis] = ("fixed" if axis in fixed else state, None)
    for dim, axes in enumerate(layout.axes):
        for index, axis in enumerate(axes):
            if axis not in fixed:
                states[axis] = (dim, index)
    return states

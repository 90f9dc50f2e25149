"""Find the collectives that redistribute a tensor from one layout to another, and their volume.

Does not import torch.

>>> from shardwright.core.layout.layout import DeviceMatrix
>>> layout = DeviceMatrix((2, 4), ("dp", "mp"))
>>> print(redistribution(layout("mp", "None"), layout("None", "mp"), (8, 8)))
(mp, None) on (dp 2, mp 4) -> (None, mp) on (dp 2, mp 4), shape (8, 8)
  all_to_all mp, dimension 0 to 1: 48 bytes forward, 48 backward (all_to_all)

The communication volume of each kind of step is defined in `core/layout/collective_spec.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, islice, product
from math import gcd, prod

from shardwright.core.layout import route_search
from shardwright.core.layout.axes import (
    Axes,
    Shape,
    axis_names,
    common_axes,
    common_length,
    shard_index,
)
from shardwright.core.layout.collective_spec import COLLECTIVES, CollectiveSpec
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.errors import LayoutError


@dataclass(frozen=True)
class RedistributionStep:
    """One collective, or a local operation whose gradient needs a collective.

    Args:
        operation: name of the step, a key of `COLLECTIVES`.
        axes: the mesh axes of the group: in the order in which they shard the dimension, the most
            significant first; in mesh order if they shard no dimension. For a permute, all axes
            whose use changes, in mesh order.
        dim: the dimension that is sharded (slice, reduce_scatter) or gathered (all_gather,
            all_to_all); None for other kinds.
        to_dim: the dimension that an all_to_all shards; None for other kinds.
        source, target: the layouts before and after the step.
    """

    operation: str
    axes: Axes
    dim: int | None
    to_dim: int | None
    source: TensorLayout
    target: TensorLayout

    @property
    def group_size(self) -> int:
        """Number of devices in a process group of the step."""
        return self.source.layout.size(self.axes)

    @property
    def spec(self) -> CollectiveSpec:
        """Specification of the step's operation: its communication volume and gradient."""
        return COLLECTIVES[self.operation]

    @property
    def forward(self) -> str | None:
        """Name of the collective of the forward pass; None without communication."""
        return None if self.spec.local else self.operation

    @property
    def backward(self) -> str | None:
        """Name of the collective of the backward pass; None without communication."""
        # A step makes all of its axes varying or none.
        return self.spec.backward_of(self.target.varying.issuperset(self.axes))

    def forward_bytes(self, shape: Shape, itemsize: int) -> int:
        """Return the bytes that one device sends in the forward pass; `shape` is global."""
        return self._count_sent_bytes(self.forward, shape, itemsize)

    def backward_bytes(self, shape: Shape, itemsize: int) -> int:
        """Return the bytes that one device sends in the backward pass; `shape` is global."""
        return self._count_sent_bytes(self.backward, shape, itemsize)

    def _count_sent_bytes(self, collective: str | None, shape: Shape, itemsize: int) -> int:
        if collective is None:
            return 0
        # The larger of input and output: the output of an all-gather, the input of a reduce-scatter
        # or a slice.
        local = itemsize * max(
            prod(self.source.shard_shape(shape)), prod(self.target.shard_shape(shape))
        )
        return COLLECTIVES[collective].sent_volume(local, self.group_size)

    def permutation(self) -> tuple[int, ...]:
        """Return the destination of each device's shard in a permute.

        Devices are positions in the group, with the `axes` in mesh order. The i-th device that has
        a shard sends it to the i-th device that needs it.

        Raises:
            LayoutError: if the step is not a permute.
        """
        if self.operation != "permute":
            raise LayoutError(
                f"a step of kind {self.operation!r} has no permutation\n"
                "call `permutation` only on steps of kind 'permute'"
            )
        receivers = self._group_positions_by_block(self.target)
        destinations = [0] * self.group_size
        for block, senders in self._group_positions_by_block(self.source).items():
            # Equally many have and need a shard, as a permute keeps the numbers of shards.
            for sender, receiver in zip(senders, receivers[block], strict=True):
                destinations[sender] = receiver
        return tuple(destinations)

    def _group_positions_by_block(self, layout: TensorLayout) -> dict[tuple[int, ...], list[int]]:
        """Map the index of each shard to the devices that have it, as positions in the group.

        Args:
            layout: `self.source` or `self.target`.
        """
        sizes = self.source.device_matrix
        pairs = zip(self.source.axes, self.target.axes, strict=True)
        # A permute keeps the numbers of shards, so leading and trailing axes that both layouts have
        # in common do not change the destination.
        differing = [_strip_common_prefix_and_suffix(before, after) for before, after in pairs]
        layout_index = 0 if layout is self.source else 1
        positions: dict[tuple[int, ...], list[int]] = {}
        group = product(*(range(sizes[axis]) for axis in self.axes))
        for position, coordinates in enumerate(group):
            coordinate = dict(zip(self.axes, coordinates, strict=True))
            block = tuple(shard_index(axes[layout_index], sizes, coordinate) for axes in differing)
            positions.setdefault(block, []).append(position)
        return positions

    def __str__(self) -> str:
        names = self.source.layout.named(self.axes)
        dims = "" if self.dim is None else f", dimension {self.dim}"
        dims += "" if self.to_dim is None else f" to {self.to_dim}"
        return f"{self.operation} {names}{dims}"


@dataclass(frozen=True)
class Redistribution:
    """The steps from one layout of a tensor to another, with their communication volume.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes per element.
    """

    source: TensorLayout
    target: TensorLayout
    shape: Shape
    itemsize: int
    steps: tuple[RedistributionStep, ...]

    @cached_property
    def forward_bytes(self) -> int:
        return sum(step.forward_bytes(self.shape, self.itemsize) for step in self.steps)

    @cached_property
    def backward_bytes(self) -> int:
        return sum(step.backward_bytes(self.shape, self.itemsize) for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}, shape {self.shape}"]
        for step in self.steps:
            forward = step.forward_bytes(self.shape, self.itemsize)
            backward = step.backward_bytes(self.shape, self.itemsize)
            collective = f" ({step.backward})" if step.backward else ""
            lines.append(f"  {step}: {forward} bytes forward, {backward} backward{collective}")
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


def redistribution(
    source: TensorLayout,
    target: TensorLayout,
    shape: Shape,
    itemsize: int = 4,
    differentiable: bool = True,
) -> Redistribution:
    """Find the cheapest redistribution of a tensor.

    Layouts on different device matrices are refined to the common axes of both.

    Args:
        source, target: the layouts before and after.
        shape: global shape of the tensor.
        itemsize: bytes per element.
        differentiable: whether the cost includes the volume of the backward pass.

    Raises:
        LayoutError: if the device matrices have no common axes, or no redistribution exists (see
            `redistribution_steps`).
    """
    mesh = source.layout
    if target.layout != mesh:
        sizes = common_axes(mesh.device_matrix, target.layout.device_matrix)
        # In the order of the source's ranks; `on` raises if no axes express the target in this
        # order.
        common = DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))), mesh.rank_list)
        source, target = source.on(common), target.on(common)
    steps = redistribution_steps(source, target, shape, differentiable)
    return Redistribution(source, target, shape, itemsize, steps)


@lru_cache(maxsize=1 << 17)
def redistribution_steps(
    source: TensorLayout, target: TensorLayout, shape: Shape, differentiable: bool = True
) -> tuple[RedistributionStep, ...]:
    """Find the cheapest steps that redistribute a tensor of `shape` from `source` to `target`.

    The cost is the bytes sent in both passes (in the forward pass if not `differentiable`), then
    the number of steps. Ties go to slices first and gathers last, and to outer axes before inner
    axes.

    If the layouts differ in at most three axes, the result is optimal among all steps over these
    axes and the dimensions that differ. Otherwise it is a heuristic that costs at most as much as
    all-reduce, all-gather and slice. If not `differentiable`, varying axes of the target are
    treated as replicated.

    Raises:
        LayoutError: if the layouts have different device matrices or numbers of dimensions, do not
            divide `shape`, the source is varying, or the target is partial over axes over which the
            source is not.
    """
    # Varying differs from replicated in the gradient only.
    if not differentiable and target.varying:
        target = replace(target, varying=frozenset())
    _check_redistribution_exists(source, target, shape)
    if source == target:
        return ()
    translation = _RouteProblemTranslation.of(source, target)
    problem = translation.problem(source, target, shape, differentiable)
    steps, current = [], source
    for move in route_search.route(problem):
        following = translation.layout_after(current, move)
        steps.append(_convert_move_to_step(move, translation, current, following))
        current = following
    return tuple(_order_by_link_speed(steps))


def joined_step(
    first: RedistributionStep, second: RedistributionStep, shape: Shape, itemsize: int
) -> RedistributionStep | None:
    """Return one step that replaces two consecutive steps and sends at most as many bytes.

    Returns None if there is no such step.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes per element.
    """
    for spec in COLLECTIVES.values():
        if spec.axes_between is None or not first.operation == second.operation == spec.joins:
            continue
        # From the first source to the last target: no value is read in the layout in between.
        axes = spec.axes_between(first.source, second.target)
        if axes is None:
            continue
        step = RedistributionStep(spec.name, axes, None, None, first.source, second.target)
        forward = sum(s.forward_bytes(shape, itemsize) for s in (first, second))
        backward = sum(s.backward_bytes(shape, itemsize) for s in (first, second))
        # Equal volume suffices: one step has the latency of one collective instead of two.
        if (
            step.forward_bytes(shape, itemsize) <= forward
            and step.backward_bytes(shape, itemsize) <= backward
        ):
            return step
    return None


def _order_by_link_speed(path: list[RedistributionStep]) -> list[RedistributionStep]:
    """Order consecutive all-gathers from outer to inner axes, reduce-scatters from inner to outer.

    The steps over outer axes, which have slower links, then send the fewest bytes. The order does
    not change the total bytes of steps that have the same collective in the backward pass.
    """
    ordered: list[RedistributionStep] = []
    # Steps with other gradients keep their place, or the backward pass would send more.
    for (operation, _), group in groupby(path, key=lambda step: (step.operation, step.backward)):
        steps = list(group)
        gathers_or_scatters = operation in ("all_gather", "reduce_scatter")
        # Two steps on one dimension have a fixed order: only its last axes can be gathered.
        if not gathers_or_scatters or len({s.dim for s in steps}) < len(steps):
            ordered += steps
            continue
        layout = steps[0].source
        # The smallest index is the outermost axis, which has the slowest links.
        for step in sorted(steps, key=lambda s: min(s.axes), reverse=operation == "reduce_scatter"):
            ordered.append(_replace_source_layout(step, layout))
            layout = ordered[-1].target
    return ordered


def _replace_source_layout(step: RedistributionStep, source: TensorLayout) -> RedistributionStep:
    """Return `step` on another source layout; its target layout changes accordingly."""
    axes = tuple(
        step.target.axes[dim] if dim == step.dim else dim_axes
        for dim, dim_axes in enumerate(source.axes)
    )
    # Only the changes of this step: in the new order, other steps precede it.
    partial = source.partial - (step.source.partial - step.target.partial)
    varying = source.varying | (step.target.varying - step.source.varying)
    target = TensorLayout(source.layout, axes, partial, varying)
    return replace(step, source=source, target=target)


def _check_redistribution_exists(source: TensorLayout, target: TensorLayout, shape: Shape) -> None:
    """Raise LayoutError if no steps lead from `source` to `target`."""
    if source.layout != target.layout:
        raise LayoutError(
            f"{source} and {target} are on different device matrices\n"
            "express both on the same device matrix with `TensorLayout.on()`"
        )
    # Both raise if the layout does not divide the shape.
    source.shard_shape(shape)
    target.shard_shape(shape)
    if source.varying:
        raise LayoutError(
            f"{source} is varying, but only the target of a redistribution can be varying\n"
            "remove `varying` from the source"
        )
    if not target.partial <= source.partial:
        raise LayoutError(
            f"{target} is partial over axes over which {source} is not, but no redistribution"
            " creates partial sums\nremove these axes from `partial` of the target"
        )


@dataclass(frozen=True)
class _RouteProblemTranslation:
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
    def of(cls, source: TensorLayout, target: TensorLayout) -> _RouteProblemTranslation:
        pairs = list(zip(source.axes, target.axes, strict=True))
        # The common leading axes divide the tensor into parts that are redistributed independently.
        prefixes = tuple(before[: common_length(before, after)] for before, after in pairs)
        # Other dimensions take no part, as a route over them would have to undo its changes.
        dims = tuple(dim for dim, (before, after) in enumerate(pairs) if before != after)
        joined = tuple(_group_redistributed_axes(source, target, prefixes))
        return cls(source.layout, joined, prefixes, dims)

    def problem(
        self, source: TensorLayout, target: TensorLayout, shape: Shape, differentiable: bool
    ) -> route_search.Problem:
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
        return route_search.Problem(
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

    def layout_after(self, current: TensorLayout, move: route_search.Move) -> TensorLayout:
        """Return the layout of a tensor after `move`, given its layout `current` before `move`."""
        axes = list(current.axes)
        for dim, problem_axes in zip(self.dims, move.axes_by_dim, strict=True):
            axes[dim] = self.prefixes[dim] + self.mesh_axes(problem_axes)
        # A permute has no axes, and leaves partial and varying ones as they are.
        moved = frozenset(self.mesh_axes(move.axes))
        reduces = move.operation in (route_search.ALL_REDUCE, route_search.REDUCE_SCATTER)
        return TensorLayout(
            self.mesh,
            tuple(axes),
            current.partial - moved if reduces else current.partial,
            current.varying | moved if move.varying else current.varying,
        )


def _convert_move_to_step(
    move: route_search.Move,
    translation: _RouteProblemTranslation,
    source: TensorLayout,
    target: TensorLayout,
) -> RedistributionStep:
    """Convert a move of the route search to the redistribution step from `source` to `target`."""
    axes = translation.mesh_axes(move.axes)
    if move.operation == route_search.PERMUTE:
        pairs = zip(source.axes, target.axes, strict=True)
        # A permute of the route search names no axes: its group is all axes that change places.
        axes = tuple(
            sorted(
                {
                    a
                    for pair in pairs
                    for axes_of_dim in _strip_common_prefix_and_suffix(*pair)
                    for a in axes_of_dim
                }
            )
        )
    # These shard no dimension, so the order of their axes is free.
    elif move.operation in (route_search.VARY, route_search.ALL_REDUCE):
        axes = tuple(sorted(axes))
    dim = translation.dims[move.dim] if move.dim >= 0 else None
    to_dim = translation.dims[move.to_dim] if move.to_dim >= 0 else None
    return RedistributionStep(route_search.KINDS[move.operation], axes, dim, to_dim, source, target)


def _strip_common_prefix_and_suffix(first: Axes, second: Axes) -> tuple[Axes, Axes]:
    """Remove the longest common prefix and suffix of two lists of axes."""
    prefix = common_length(first, second)
    first, second = first[prefix:], second[prefix:]
    suffix = common_length(first[::-1], second[::-1])
    return first[: len(first) - suffix], second[: len(second) - suffix]


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
    if len(moving) <= route_search.ALL_MOVES_AXES:
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

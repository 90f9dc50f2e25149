"""From one layout of a tensor to another: the collectives, their order and their bytes. No torch.

>>> from shardwright.core.layout.layout import DeviceMatrix
>>> layout = DeviceMatrix((2, 4), ("dp", "mp"))
>>> print(redistribution(layout("mp", "None"), layout("None", "mp"), (8, 8)))
(mp, None) on (dp 2, mp 4) -> (None, mp) on (dp 2, mp 4), shape (8, 8)
  all_to_all mp, dimension 0 to 1: 48 bytes forward, 48 backward (all_to_all)

What each kind of step sends stands in `core/layout/collective_spec.py`.
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
    block_number,
    common_axes,
    common_length,
)
from shardwright.core.layout.collective_spec import COLLECTIVES, CollectiveSpec
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.errors import LayoutError


@dataclass(frozen=True)
class RedistributionStep:
    """One collective, or a local operation whose gradient is one.

    Args:
        kind: one of `COLLECTIVES`.
        axes: the joined axes, the most significant first as they lie, or come to lie, in the
            dimension; in mesh order where they lie in none. Of a permute: all axes whose meaning
            changes, in mesh order.
        dim: the dimension that gets cut (slice, reduce_scatter), becomes whole (all_gather), or
            is left (all_to_all).
        to_dim: the dimension that an all_to_all enters.
    """

    kind: str
    axes: Axes
    dim: int | None
    to_dim: int | None
    source: TensorLayout
    target: TensorLayout

    @property
    def group_size(self) -> int:
        """How many devices take part in one group."""
        return self.source.layout.size(self.axes)

    @property
    def spec(self) -> CollectiveSpec:
        """All that is known of its kind."""
        return COLLECTIVES[self.kind]

    @property
    def forward(self) -> str | None:
        """The collective of the forward pass; None if that sends nothing."""
        return None if self.spec.local else self.kind

    @property
    def backward(self) -> str | None:
        """The collective of the gradient; None if that sends nothing."""
        return self.spec.backward_of(self.target.varying.issuperset(self.axes))

    def forward_bytes(self, shape: Shape, itemsize: int) -> int:
        """Bytes that one device sends; `shape` is the whole tensor's."""
        return self._bytes(self.forward, shape, itemsize)

    def backward_bytes(self, shape: Shape, itemsize: int) -> int:
        """Bytes that one device sends for the gradient; `shape` is the whole tensor's."""
        return self._bytes(self.backward, shape, itemsize)

    def _bytes(self, collective: str | None, shape: Shape, itemsize: int) -> int:
        if collective is None:
            return 0
        # The larger side: what an all-gather gives, what a reduce-scatter or a slice takes.
        local = itemsize * max(
            prod(self.source.shard_shape(shape)), prod(self.target.shard_shape(shape))
        )
        return COLLECTIVES[collective].sent(local, self.group_size)

    def permutation(self) -> tuple[int, ...]:
        """Of a permute: for each position in the group the position it sends its block to.

        Positions count the joined `axes` in mesh order. The i-th of the devices that hold a block
        sends to the i-th of those that shall hold it.

        Raises:
            LayoutError: if the step is no permute.
        """
        if self.kind != "permute":
            raise LayoutError(f"a step of kind {self.kind} has no permutation")
        holders = self._holders(self.target)
        destinations = [0] * self.group_size
        for block, senders in self._holders(self.source).items():
            for sender, receiver in zip(senders, holders[block], strict=True):
                destinations[sender] = receiver
        return tuple(destinations)

    def _holders(self, side: TensorLayout) -> dict[tuple[int, ...], list[int]]:
        """The positions in the group that hold each block of what the group has in common."""
        sizes = self.source.device_matrix
        pairs = zip(self.source.axes, self.target.axes, strict=True)
        middles = [_apart(mine, other) for mine, other in pairs]
        which = 0 if side is self.source else 1
        holders: dict[tuple[int, ...], list[int]] = {}
        places = product(*(range(sizes[axis]) for axis in self.axes))
        for position, place in enumerate(places):
            coordinate = dict(zip(self.axes, place, strict=True))
            block = tuple(block_number(middle[which], sizes, coordinate) for middle in middles)
            holders.setdefault(block, []).append(position)
        return holders

    def __str__(self) -> str:
        names = self.source.layout.named(self.axes)
        dims = "" if self.dim is None else f", dimension {self.dim}"
        dims += "" if self.to_dim is None else f" to {self.to_dim}"
        return f"{self.kind} {names}{dims}"


@dataclass(frozen=True)
class Redistribution:
    """The steps from one layout of a tensor to another, and the bytes that one device sends."""

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
            by = f" ({step.backward})" if step.backward else ""
            lines.append(f"  {step}: {forward} bytes forward, {backward} backward{by}")
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


def redistribution(
    source: TensorLayout,
    target: TensorLayout,
    shape: Shape,
    itemsize: int = 4,
    differentiable: bool = True,
) -> Redistribution:
    """The cheapest redistribution of a tensor of `shape` with elements of `itemsize` bytes. Layouts
    over different device matrices are both refined to the axes that these have in common.

    Raises:
        LayoutError: as `steps`, or the device matrices have no common axes.
    """
    mesh = source.layout
    if target.layout != mesh:
        sizes = common_axes(mesh.device_matrix, target.layout.device_matrix)
        common = DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))), mesh.rank_list)
        source, target = source.on(common), target.on(common)
    steps = redistribution_steps(source, target, shape, differentiable)
    return Redistribution(source, target, shape, itemsize, steps)


@lru_cache(maxsize=1 << 17)
def redistribution_steps(
    source: TensorLayout, target: TensorLayout, shape: Shape, differentiable: bool = True
) -> tuple[RedistributionStep, ...]:
    """The cheapest steps that bring a tensor of `shape` from `source` to `target`.

    Fewest bytes (forward and backward; forward only if not `differentiable`), then fewest steps,
    then slices first and gathers last (those over the outermost axes before others): the cheapest
    of all ways that change only the dimensions and axes in which the layouts differ where these
    are three axes at most; else a good one, and never dearer than to reduce, gather and slice.
    Where nothing differentiable flows, varying axes of the target are taken as replicated.

    Raises:
        LayoutError: if the layouts are of different device matrices or numbers of dimensions, do
            not divide `shape`, the source is varying, or the target is partial where the source
            is not.
    """
    if not differentiable and target.varying:
        target = replace(target, varying=frozenset())
    _check(source, target, shape)
    if source == target:
        return ()
    table = _Table.of(source, target)
    problem = table.problem(source, target, shape, differentiable)
    steps, here = [], source
    for move in route_search.route(problem):
        there = table.after(here, move)
        steps.append(_step(move, table, here, there))
        here = there
    return tuple(_slow_links_on_small_tensors(steps))


def joined_step(
    first: RedistributionStep, second: RedistributionStep, shape: Shape, itemsize: int
) -> RedistributionStep | None:
    """One step that does what two in a row do; None if no kind does so at no more bytes.

    Args:
        shape: of the whole tensor, with elements of `itemsize` bytes.
    """
    for spec in COLLECTIVES.values():
        if spec.axes_between is None or not first.kind == second.kind == spec.joins:
            continue
        axes = spec.axes_between(first.source, second.target)
        if axes is None:
            continue
        step = RedistributionStep(spec.kind, axes, None, None, first.source, second.target)
        forward = sum(s.forward_bytes(shape, itemsize) for s in (first, second))
        backward = sum(s.backward_bytes(shape, itemsize) for s in (first, second))
        if (
            step.forward_bytes(shape, itemsize) <= forward
            and step.backward_bytes(shape, itemsize) <= backward
        ):
            return step
    return None


def _slow_links_on_small_tensors(path: list[RedistributionStep]) -> list[RedistributionStep]:
    """Gathers in a row over the outermost axes first, reduce-scatters in a row over them last.

    The order of such steps changes no bytes in total where their gradients are alike too, but which
    link carries most of them; outer axes lie over slower links.
    """
    ordered: list[RedistributionStep] = []
    for (kind, _), group in groupby(path, key=lambda step: (step.kind, step.backward)):
        row = list(group)
        if kind not in ("all_gather", "reduce_scatter") or len({s.dim for s in row}) < len(row):
            ordered += row
            continue
        here = row[0].source
        for step in sorted(row, key=lambda s: min(s.axes), reverse=kind == "reduce_scatter"):
            ordered.append(_from(here, step))
            here = ordered[-1].target
    return ordered


def _from(here: TensorLayout, step: RedistributionStep) -> RedistributionStep:
    """`step`, which changes one dimension, made from `here` on."""
    axes = tuple(
        step.target.axes[dim] if dim == step.dim else mine for dim, mine in enumerate(here.axes)
    )
    partial = here.partial - (step.source.partial - step.target.partial)
    varying = here.varying | (step.target.varying - step.source.varying)
    return replace(step, source=here, target=TensorLayout(here.layout, axes, partial, varying))


def _check(source: TensorLayout, target: TensorLayout, shape: Shape) -> None:
    if source.layout != target.layout:
        raise LayoutError(
            f"{source} and {target} are on different device matrices;"
            " express both on one with TensorLayout.on()"
        )
    source.shard_shape(shape)
    target.shard_shape(shape)
    if source.varying:
        raise LayoutError(f"{source} is varying; only a layout that is read can be")
    if not target.partial <= source.partial:
        raise LayoutError(
            f"{target} is partial where {source} is not; no redistribution creates partial sums"
        )


@dataclass(frozen=True)
class _Table:
    """Which axes move together (as one axis of the problem), and what stays as it is."""

    layout: DeviceMatrix
    joined: tuple[Axes, ...]
    kept: tuple[Axes, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, source: TensorLayout, target: TensorLayout) -> _Table:
        pairs = list(zip(source.axes, target.axes, strict=True))
        kept = tuple(mine[: common_length(mine, other)] for mine, other in pairs)
        dims = tuple(dim for dim, (mine, other) in enumerate(pairs) if mine != other)
        return cls(source.layout, tuple(_join(source, target, kept)), kept, dims)

    def problem(
        self, source: TensorLayout, target: TensorLayout, shape: Shape, differentiable: bool
    ) -> route_search.Problem:
        sizes = tuple(self.layout.size(axes) for axes in self.joined)
        index = {axes[0]: number for number, axes in enumerate(self.joined)}
        everything = prod(sizes)

        def numbers(axes: Iterable[int]) -> Axes:
            return tuple(index[axis] for axis in axes if axis in index)

        # Only what divides counts: equal problems of different shapes are searched once.
        left = (shape[dim] // self.layout.size(self.kept[dim]) for dim in self.dims)
        return route_search.Problem(
            sizes,
            tuple(numbers(source.axes[dim]) for dim in self.dims),
            tuple(numbers(target.axes[dim]) for dim in self.dims),
            frozenset(numbers(source.partial - target.partial)),
            frozenset(numbers(target.varying)),
            tuple(gcd(size, everything) if size else everything for size in left),
            differentiable,
        )

    def axes_of(self, numbers: Iterable[int]) -> Axes:
        return tuple(axis for number in numbers for axis in self.joined[number])

    def after(self, here: TensorLayout, move: route_search.Move) -> TensorLayout:
        axes = list(here.axes)
        for dim, numbers in zip(self.dims, move.lists, strict=True):
            axes[dim] = self.kept[dim] + self.axes_of(numbers)
        moved = frozenset(self.axes_of(move.axes))
        reduces = move.kind in (route_search.ALL_REDUCE, route_search.REDUCE_SCATTER)
        return TensorLayout(
            self.layout,
            tuple(axes),
            here.partial - moved if reduces else here.partial,
            here.varying | moved if move.varying else here.varying,
        )


def _step(
    move: route_search.Move, table: _Table, source: TensorLayout, target: TensorLayout
) -> RedistributionStep:
    axes = table.axes_of(move.axes)
    if move.kind == route_search.PERMUTE:
        pairs = zip(source.axes, target.axes, strict=True)
        axes = tuple(sorted({a for pair in pairs for middle in _apart(*pair) for a in middle}))
    elif move.kind in (route_search.VARY, route_search.ALL_REDUCE):
        axes = tuple(sorted(axes))
    dim = table.dims[move.dim] if move.dim >= 0 else None
    to_dim = table.dims[move.to_dim] if move.to_dim >= 0 else None
    return RedistributionStep(route_search.KINDS[move.kind], axes, dim, to_dim, source, target)


def _apart(mine: Axes, other: Axes) -> tuple[Axes, Axes]:
    """Two lists without the axes with which both begin and both end."""
    front = common_length(mine, other)
    mine, other = mine[front:], other[front:]
    back = common_length(mine[::-1], other[::-1])
    return mine[: len(mine) - back], other[: len(other) - back]


def _join(source: TensorLayout, target: TensorLayout, kept: tuple[Axes, ...]) -> list[Axes]:
    """The axes that do not stay as they are; where they are many, those that go together joined."""
    standing = {axis for axes in kept for axis in axes}
    before, after = _places(source, standing), _places(target, standing)
    moving = [a for a in before if before[a] != after[a] or before[a][1] is not None]

    if len(moving) <= route_search.ALL_MOVES_AXES:
        return [(axis,) for axis in moving]

    def follows(axis: int, other: int) -> bool:
        """Whether in both layouts `other` comes right after `axis`, or in any order."""
        return all(
            place[axis][0] == place[other][0]
            and (place[axis][1] is None or place[other][1] == (place[axis][1] or 0) + 1)
            for place in (before, after)
        )

    # Where an order counts on one side only, it decides how the axes stand on the other.
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


def _places(side: TensorLayout, standing: set[int]) -> dict[int, tuple[int | str, int | None]]:
    """Where each axis stands: the dimension and the place in its list, or its other state."""
    places: dict[int, tuple[int | str, int | None]] = {}
    for axis in range(len(side.device_matrix)):
        state = "partial" if axis in side.partial else "varying" if axis in side.varying else ""
        places[axis] = ("stays" if axis in standing else state, None)
    for dim, axes in enumerate(side.axes):
        for place, axis in enumerate(axes):
            if axis not in standing:
                places[axis] = (dim, place)
    return places

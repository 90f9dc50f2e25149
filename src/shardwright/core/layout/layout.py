"""How a tensor lies on a matrix of devices. No torch in here.

A `Layout` is the device matrix with a name for each of its axes, the outermost (slowest varying in
rank order) first. Called with one entry per tensor dimension it makes a `TensorLayout`:

>>> layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
>>> a = layout("mp", ("sp", "dp"))
>>> a.shard_counts
(2, 4)
>>> a.slices(4, (2, 4))
(slice(0, 1, None), slice(1, 2, None))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

from shardwright.core.layout.axes import (
    INTERLEAVED,
    Axes,
    axes_with_devices,
    block_number,
    check_ranks,
)
from shardwright.core.layout.visualize import Drawing, draw_devices
from shardwright.errors import LayoutError


@dataclass(frozen=True, init=False)
class Layout:
    """A device matrix whose axes have names.

    Args:
        device_matrix: number of devices along each axis, outermost first.
        alias_names: one name for each axis; `alias_name` and `name` are the same. A last axis
            called `interleaved_parallel` cuts a tensor into parts that stay on one device: it has
            no devices, and cuts nothing here.
        rank_list: the rank at each place of the matrix in row-major order; by default 0, 1, 2, …

    Raises:
        LayoutError: if these are not tuples of positive ints, of distinct names, of distinct ranks.
    """

    device_matrix: tuple[int, ...]
    alias_names: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None
    interleaved: bool = field(default=False, compare=False, repr=False)

    def __init__(
        self,
        device_matrix: tuple[int, ...],
        alias_names: tuple[str, ...] | None = None,
        rank_list: tuple[int, ...] | None = None,
        *,
        alias_name: tuple[str, ...] | None = None,
        name: tuple[str, ...] | None = None,
    ) -> None:
        spelled = [names for names in (alias_names, alias_name, name) if names is not None]
        if len(spelled) != 1:
            raise LayoutError("give alias_names, a tuple with one name for each axis, once")
        sizes, names = axes_with_devices(device_matrix, spelled[0])
        if rank_list is not None:
            check_ranks(rank_list, prod(sizes))
        values = (sizes, names, rank_list, len(names) < len(spelled[0]))
        vars(self).update(zip(self.__dataclass_fields__, values, strict=True))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Ints only: hashes of str change from process to process, a pickled one would be wrong.
        return hash((self.device_matrix, self.rank_list or ()))

    def __call__(self, *entries: str | tuple[str, ...]) -> TensorLayout:
        """The layout of a tensor with one entry for each of its dimensions.

        Args:
            entries: the name of the axis that cuts the dimension; a tuple of names, the most
                significant first, where several do; `"None"` where it is whole.

        Raises:
            LayoutError: if a name is unknown or stands twice.
        """
        return TensorLayout(self, tuple(self._axes_of(entry) for entry in entries))

    def _axes_of(self, entry: str | tuple[str, ...]) -> Axes:
        names = (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise LayoutError(
                f"a dimension is laid out by a name, a tuple of names or 'None', not by {entry!r}"
            )
        virtual = ("None", INTERLEAVED) if self.interleaved else ("None",)
        return tuple(self.axis(name) for name in names if name not in virtual)

    @property
    def num_devices(self) -> int:
        return prod(self.device_matrix)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank at each place of the matrix in row-major order."""
        return self.rank_list if self.rank_list is not None else tuple(range(self.num_devices))

    def axis(self, name: str) -> int:
        """The index from the left of the axis called `name`.

        Raises:
            LayoutError: if no axis is called so.
        """
        if name not in self.alias_names:
            known = ", ".join(map(repr, self.alias_names)) or "no axes at all"
            raise LayoutError(f"unknown axis {name!r}; this layout has {known}, and 'None'")
        return self.alias_names.index(name)

    def named(self, axes: Iterable[int], between: str = "·") -> str:
        """The names of `axes` as text: `dp·tp`."""
        return between.join(self.alias_names[axis] for axis in axes)

    @property
    def sizes(self) -> str:
        """Each axis with its number of devices, as text: `dp 4, tp 2`."""
        return ", ".join(map("{} {}".format, self.alias_names, self.device_matrix))

    def size(self, axes: Iterable[int]) -> int:
        """Number of devices along the joined `axes` (indices from the left)."""
        return prod(self.device_matrix[a] for a in axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where `rank` stands on each axis.

        Raises:
            LayoutError: if the rank is none of this layout's.
        """
        if rank not in self._places:
            raise LayoutError(f"rank {rank} is none of the ranks of this layout: {self.ranks}")
        place, coordinates = self._places[rank], []
        for size in reversed(self.device_matrix):
            place, coordinate = divmod(place, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def replicated(self, ndim: int) -> TensorLayout:
        """The layout in which every device holds the whole tensor."""
        return TensorLayout(self, ((),) * ndim)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold; `rank_list` only where one was given."""
        data: dict[str, Any] = {
            "device_matrix": list(self.device_matrix),
            "alias_names": list(self.alias_names),
        }
        return data if self.rank_list is None else data | {"rank_list": list(self.rank_list)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        ranks = data.get("rank_list")
        return cls(
            tuple(data["device_matrix"]),
            tuple(data["alias_names"]),
            None if ranks is None else tuple(ranks),
        )


DeviceMatrix = Layout
"""The device matrix of a plan: the same class, under its name in the core.

Users know it as `sw.Layout`, the name in MindSpore, since it is what they call to lay out a tensor.
"""


@dataclass(frozen=True, repr=False)
class TensorLayout:
    """How one tensor lies on the devices of a `Layout`.

    Args:
        layout: the device matrix.
        axes: for each tensor dimension the axes (indices into the device matrix, from the left)
            that cut it, the most significant first; `()` where the dimension is whole.
        partial: axes on which every device holds one term of a sum.
        varying: axes on which the value is replicated but its gradient is one term of a sum.

    Raises:
        LayoutError: if an axis stands twice or is none of the layout's.
    """

    layout: DeviceMatrix
    axes: tuple[Axes, ...]
    partial: frozenset[int] = frozenset()
    varying: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        used = [axis for dim in self.axes for axis in dim]
        used += self.partial
        used += self.varying
        if not used:
            return
        matrix = self.layout.device_matrix
        if min(used) < 0 or max(used) >= len(matrix):
            raise LayoutError(f"axes {sorted(used)} on device matrix {matrix}: no such axis")
        if len(set(used)) != len(used):
            twice = sorted({axis for axis in used if used.count(axis) > 1})
            names = ", ".join(repr(self.layout.alias_names[axis]) for axis in twice)
            raise LayoutError(f"axis {names} is used more than once; an axis may be used once")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.axes, self.partial, self.varying))

    @property
    def device_matrix(self) -> tuple[int, ...]:
        return self.layout.device_matrix

    @property
    def alias_names(self) -> tuple[str, ...]:
        return self.layout.alias_names

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """For each dimension the axis that cuts it, counted from the right: the last axis is 0.

        -1 where the dimension is whole, a tuple where several axes cut it.
        """
        last = len(self.device_matrix) - 1
        mapped = (tuple(last - axis for axis in dim) for dim in self.axes)
        return tuple(-1 if not dim else dim[0] if len(dim) == 1 else dim for dim in mapped)

    @cached_property
    def sharded(self) -> frozenset[int]:
        """The axes that cut some dimension."""
        return frozenset(a for dim in self.axes for a in dim)

    @cached_property
    def shard_counts(self) -> tuple[int, ...]:
        """In how many parts each dimension is cut."""
        return tuple(self.layout.size(dim) for dim in self.axes)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part of a tensor of `shape`.

        Raises:
            LayoutError: if `shape` has other dimensions, or one that its parts do not divide.
        """
        if shape not in self._shard_shapes:
            self._shard_shapes[shape] = self._divided(shape)
        return self._shard_shapes[shape]

    @cached_property
    def _shard_shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Of the shapes that were asked for: searches and predictions ask for few, very often."""
        return {}

    def _divided(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != len(self.axes):
            raise LayoutError(
                f"the layout {self} is of {len(self.axes)} dimensions, the shape {tuple(shape)}"
                f" of {len(shape)}"
            )
        for dim, (size, parts) in enumerate(zip(shape, self.shard_counts, strict=True)):
            if size % parts:
                raise LayoutError(
                    f"dimension {dim} of size {size} cannot be cut in {parts} equal parts"
                    f" (shape {tuple(shape)}, layout {self})"
                )
        return tuple(size // parts for size, parts in zip(shape, self.shard_counts, strict=True))

    def block(self, rank: int) -> tuple[int, ...]:
        """Which of the parts of each dimension `rank` holds."""
        return self._block_at(self.layout.coordinates(rank))

    def _block_at(self, coordinates: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self.device_matrix
        return tuple([block_number(dim, sizes, coordinates) for dim in self.axes])

    def slices(self, rank: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of a tensor of `shape` that `rank` holds.

        Raises:
            LayoutError: as `shard_shape`, or if the rank is none of the layout's.
        """
        local = self.shard_shape(shape)
        return tuple(
            slice(index * size, (index + 1) * size)
            for index, size in zip(self.block(rank), local, strict=True)
        )

    def ranks_of(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """All ranks that hold the part with this index, in the order of the device matrix.

        Raises:
            LayoutError: if there is no such part.
        """
        if tuple(block) not in self._holders:
            raise LayoutError(f"no block {tuple(block)}: dimensions are cut in {self.shard_counts}")
        return self._holders[tuple(block)]

    @cached_property
    def _holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        holders: dict[tuple[int, ...], list[int]] = {}
        places = product(*(range(size) for size in self.device_matrix))
        for rank, coordinates in zip(self.layout.ranks, places, strict=True):
            holders.setdefault(self._block_at(coordinates), []).append(rank)
        return {block: tuple(ranks) for block, ranks in holders.items()}

    def on(self, mesh: DeviceMatrix) -> TensorLayout:
        """The same placement on a device matrix that is finer, or arranges the ranks otherwise.

        Raises:
            LayoutError: if `mesh` has other ranks, or no axes that make up those of this layout.
        """
        pieces = _refinement(self.layout, mesh)

        def refined(axes: Iterable[int]) -> Axes:
            return tuple(fine for axis in axes for fine in pieces[axis])

        return TensorLayout(
            mesh,
            tuple(refined(dim) for dim in self.axes),
            frozenset(refined(self.partial)),
            frozenset(refined(self.varying)),
        )

    @property
    def placement(self) -> str:
        """The axes of each dimension by name: `(a, b·c; partial d)`."""
        named = self.layout.named
        dims = ", ".join(named(dim) or "None" for dim in self.axes)
        marks = f"; partial {named(sorted(self.partial), ' ')}" if self.partial else ""
        marks += f"; varying {named(sorted(self.varying), ' ')}" if self.varying else ""
        return f"({dims}{marks})"

    def __repr__(self) -> str:
        return f"{self.placement} on ({self.layout.sizes})"

    def _repr_html_(self) -> str:
        return f"<code>{self!r}</code>{self.visualize()._repr_html_()}"

    def visualize(self, shape: tuple[int, ...] | None = None) -> Drawing:
        """A grid of the blocks, in each cell the ranks that hold it, in colors in a notebook.

        Rows are the last dimension but one, columns the last; of more there is one grid for each
        index of the leading blocks. With `shape` edges show elements, else the index of the block.

        Raises:
            LayoutError: as `shard_shape`.
        """
        sizes = self.shard_shape(shape) if shape is not None else None
        return draw_devices(self.shard_counts, sizes, self.ranks_of)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold; `partial` and `varying` as names, only where there are any."""
        data = self.layout.to_dict() | {"tensor_map": list(self.tensor_map)}
        for key, axes in (("partial", self.partial), ("varying", self.varying)):
            if axes:
                data[key] = [self.alias_names[axis] for axis in sorted(axes)]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorLayout:
        layout = Layout.from_dict(data)
        last = len(layout.device_matrix) - 1

        def axes_of(entry: int | Iterable[int]) -> Axes:
            mapped = (entry,) if isinstance(entry, int) else tuple(entry)
            return tuple(last - axis for axis in mapped if axis != -1)

        return cls(
            layout,
            tuple(axes_of(entry) for entry in data["tensor_map"]),
            frozenset(layout.axis(name) for name in data.get("partial", ())),
            frozenset(layout.axis(name) for name in data.get("varying", ())),
        )


def _refinement(coarse: DeviceMatrix, fine: DeviceMatrix) -> tuple[Axes, ...]:
    """For each axis of `coarse` the axes of `fine` that make it up, most significant first."""
    if set(coarse.ranks) != set(fine.ranks):
        raise LayoutError(f"{fine.device_matrix} is not made of the same ranks as {coarse}")
    strides: list[list[tuple[int, int]]] = [[] for _ in coarse.device_matrix]
    step = fine.num_devices
    start = coarse.coordinates(fine.ranks[0])
    for axis, size in enumerate(fine.device_matrix):
        step //= size
        if size == 1:
            continue
        moved = coarse.coordinates(fine.ranks[step])
        deltas = [(a, new - old) for a, (old, new) in enumerate(zip(start, moved, strict=True))]
        for coarse_axis, delta in deltas:
            if delta:
                strides[coarse_axis].append((-delta, axis))
    pieces = tuple(tuple(axis for _, axis in sorted(axes)) for axes in strides)
    if not _agrees(coarse, fine, pieces):
        raise LayoutError(
            f"the device matrix {fine.device_matrix} does not refine {coarse.device_matrix}:"
            " its axes do not make up those of the other one"
        )
    return pieces


def _agrees(coarse: DeviceMatrix, fine: DeviceMatrix, pieces: tuple[Axes, ...]) -> bool:
    if tuple(map(fine.size, pieces)) != coarse.device_matrix:
        return False
    used = [axis for piece in pieces for axis in piece]
    if len(set(used)) != len(used):
        return False
    joined = TensorLayout(fine, pieces)
    return all(joined.block(rank) == coarse.coordinates(rank) for rank in fine.ranks)


@lru_cache(maxsize=1 << 16)
def interned_layout(
    layout: DeviceMatrix,
    axes: tuple[Axes, ...],
    partial: frozenset[int] = frozenset(),
    varying: frozenset[int] = frozenset(),
) -> TensorLayout:
    """A `TensorLayout`, equal ones as one object: searches look up what they know of layouts very
    often, and objects that are the same need no comparison. Raises: as `TensorLayout`."""
    return TensorLayout(layout, axes, partial, varying)

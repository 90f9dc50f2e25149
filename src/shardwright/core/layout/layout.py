"""Layouts of tensors on a device matrix. Does not import torch.

A `Layout` is a device matrix with named axes, the outermost (slowest varying in rank order) first.
Called with one entry per tensor dimension it makes a `TensorLayout`:

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
    check_ranks,
    shard_index,
)
from shardwright.core.layout.visualize import Drawing, draw_devices
from shardwright.errors import LayoutError


@dataclass(frozen=True, init=False)
class Layout:
    """A device matrix with named axes.

    Args:
        device_matrix: number of devices along each axis, outermost first.
        alias_names: one name for each axis; also accepted as `alias_name` or `name`. A last axis
            called `interleaved_parallel` is virtual, as in MindSpore: it has no devices and shards
            nothing.
        rank_list: the rank at each position of the matrix in row-major order; by default 0, 1, 2, …

    Raises:
        LayoutError: if `device_matrix` is not a tuple of positive ints, or `alias_names` or
            `rank_list` is not a tuple of distinct entries, one per axis or device.
    """

    device_matrix: tuple[int, ...]
    alias_names: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None
    # Not compared: it only allows entries to name the virtual axis.
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
        # `alias_name` and `name` are spellings of MindSpore.
        given_names = [names for names in (alias_names, alias_name, name) if names is not None]
        if len(given_names) != 1:
            raise LayoutError(
                "a Layout needs exactly one of `alias_names`, `alias_name` and `name`\n"
                "pass one name for each axis: Layout((2, 4), ('dp', 'mp'))"
            )
        sizes, names = axes_with_devices(device_matrix, given_names[0])
        if rank_list is not None:
            check_ranks(rank_list, prod(sizes))
        # Fewer names than given: the last axis was the virtual one.
        values = (sizes, names, rank_list, len(names) < len(given_names[0]))
        # A frozen dataclass raises on `self.x = …`.
        vars(self).update(zip(self.__dataclass_fields__, values, strict=True))

    def __hash__(self) -> int:
        # Computed once: layouts are keys of all caches of the searches.
        return self._cached_hash

    @cached_property
    def _cached_hash(self) -> int:
        # Ints only: hashes of str differ between processes, and a pickled layout keeps its hash.
        return hash((self.device_matrix, self.rank_list or ()))

    def __call__(self, *entries: str | tuple[str, ...]) -> TensorLayout:
        """Make the layout of a tensor.

        Args:
            entries: one entry per dimension: the name of the axis that shards it, a tuple of the
                names of several axes (the most significant first), or `"None"` if it is not
                sharded.

        Raises:
            LayoutError: if a name is unknown or used twice.
        """
        return TensorLayout(self, tuple(self._parse_entry(entry) for entry in entries))

    def _parse_entry(self, entry: str | tuple[str, ...]) -> Axes:
        names = (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise LayoutError(
                f"invalid entry of a dimension: {entry!r}\n"
                "use the name of an axis, a tuple of names, or 'None'"
            )
        # The virtual axis has no devices, so an entry with its name shards nothing.
        virtual = ("None", INTERLEAVED) if self.interleaved else ("None",)
        return tuple(self.axis(name) for name in names if name not in virtual)

    @property
    def num_devices(self) -> int:
        return prod(self.device_matrix)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank at each position of the matrix in row-major order."""
        return self.rank_list if self.rank_list is not None else tuple(range(self.num_devices))

    def axis(self, name: str) -> int:
        """Return the index, from the left, of the axis called `name`.

        Raises:
            LayoutError: if the layout has no such axis.
        """
        if name not in self.alias_names:
            names = ", ".join(map(repr, (*self.alias_names, "None")))
            raise LayoutError(f"unknown axis {name!r}\nuse one of {names}")
        return self.alias_names.index(name)

    def named(self, axes: Iterable[int], between: str = "·") -> str:
        """Return the joined names of `axes`, such as `dp·tp`."""
        return between.join(self.alias_names[axis] for axis in axes)

    @property
    def sizes(self) -> str:
        """All axes with their numbers of devices as text, such as `dp 4, tp 2`."""
        return ", ".join(map("{} {}".format, self.alias_names, self.device_matrix))

    def size(self, axes: Iterable[int]) -> int:
        """Return the product of the numbers of devices along `axes` (indices from the left)."""
        return prod(self.device_matrix[a] for a in axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of `rank` on each axis.

        Raises:
            LayoutError: if the layout does not have this rank.
        """
        # `rank_list` may name any ranks, such as 4 to 7 for the second half of 8.
        if rank not in self._position_of_rank:
            first, last = min(self.ranks), max(self.ranks)
            raise LayoutError(
                f"this layout has no rank {rank}\nuse one of its ranks, from {first} to {last}"
            )
        position, coordinates = self._position_of_rank[rank], []
        # The last axis varies fastest in rank order.
        for size in reversed(self.device_matrix):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    @cached_property
    def _position_of_rank(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def replicated(self, ndim: int) -> TensorLayout:
        """Return the layout of a replicated tensor with `ndim` dimensions."""
        return TensorLayout(self, ((),) * ndim)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as JSON data; `rank_list` is omitted if it is None."""
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
"""Name of `Layout` within the package; `sw.Layout` is the public name, which MindSpore uses."""


@dataclass(frozen=True, repr=False)
class TensorLayout:
    """The layout of one tensor on a device matrix.

    Args:
        layout: the device matrix.
        axes: the axes that shard each tensor dimension (indices into the device matrix, from the
            left), the most significant first; `()` for a dimension that is not sharded.
        partial: axes over which the tensor is a partial sum: the tensor is the sum over their
            devices.
        varying: axes over which the tensor is replicated, but its gradient is a partial sum.

    Raises:
        LayoutError: if an axis is used twice, or is not an axis of the device matrix.
    """

    layout: DeviceMatrix
    axes: tuple[Axes, ...]
    partial: frozenset[int] = frozenset()
    varying: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        used = [axis for dim in self.axes for axis in dim]
        # An axis has one state: it shards one dimension, or is partial, or varying.
        used += self.partial
        used += self.varying
        # A replicated tensor uses no axes, and `min` fails on an empty list.
        if not used:
            return
        matrix = self.layout.device_matrix
        if min(used) < 0 or max(used) >= len(matrix):
            raise LayoutError(
                f"axes {sorted(used)} on device matrix {matrix}: no such axis\nuse indices of its"
                f" {len(matrix)} axes, from 0"
            )
        if len(set(used)) != len(used):
            twice = sorted({axis for axis in used if used.count(axis) > 1})
            names = ", ".join(repr(self.layout.alias_names[axis]) for axis in twice)
            raise LayoutError(
                f"axis {names} is used more than once\nuse each axis for only one dimension"
            )

    def __hash__(self) -> int:
        return self._cached_hash

    @cached_property
    def _cached_hash(self) -> int:
        return hash((self.layout, self.axes, self.partial, self.varying))

    @property
    def device_matrix(self) -> tuple[int, ...]:
        return self.layout.device_matrix

    @property
    def alias_names(self) -> tuple[str, ...]:
        return self.layout.alias_names

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """MindSpore's `tensor_map`: for each dimension, the axis that shards it, from 0 for the
        last axis.

        -1 stands for a dimension that is not sharded, a tuple for several axes.
        """
        last = len(self.device_matrix) - 1
        mapped = (tuple(last - axis for axis in dim) for dim in self.axes)
        return tuple(-1 if not dim else dim[0] if len(dim) == 1 else dim for dim in mapped)

    @cached_property
    def sharded(self) -> frozenset[int]:
        """Indices of the axes that shard any dimension of the tensor."""
        return frozenset(a for dim in self.axes for a in dim)

    @cached_property
    def shard_counts(self) -> tuple[int, ...]:
        """Number of shards of each dimension of the tensor."""
        return tuple(self.layout.size(dim) for dim in self.axes)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one device's shard of a tensor of global shape `shape`.

        Raises:
            LayoutError: if the number of dimensions differs, or a size is not divisible by the
                number of shards.
        """
        if shape not in self._shard_shapes:
            self._shard_shapes[shape] = self._compute_shard_shape(shape)
        return self._shard_shapes[shape]

    @cached_property
    def _shard_shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        # A cache: searches and predictions look up the same few shapes very often.
        return {}

    def _compute_shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != len(self.axes):
            raise LayoutError(
                f"the layout {self} has {len(self.axes)} dimensions, but the shape {tuple(shape)}"
                f" has {len(shape)}\nuse a layout with one entry per dimension"
            )
        for dim, (size, count) in enumerate(zip(shape, self.shard_counts, strict=True)):
            if size % count:
                raise LayoutError(
                    f"dimension {dim} of size {size} is not divisible into {count} shards"
                    f" (shape {tuple(shape)}, layout {self})\nuse a multiple of {count}"
                )
        # Shards are even, so all ranks have this shape.
        return tuple(size // count for size, count in zip(shape, self.shard_counts, strict=True))

    def block(self, rank: int) -> tuple[int, ...]:
        """Return the index of the shard of `rank` along each dimension."""
        return self._compute_block_index(self.layout.coordinates(rank))

    def _compute_block_index(self, coordinates: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self.device_matrix
        return tuple([shard_index(dim, sizes, coordinates) for dim in self.axes])

    def slices(self, rank: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of a tensor of global shape `shape` that are the shard of `rank`.

        Raises:
            LayoutError: if the layout cannot shard the shape, or does not have the rank.
        """
        local = self.shard_shape(shape)
        return tuple(
            slice(index * size, (index + 1) * size)
            for index, size in zip(self.block(rank), local, strict=True)
        )

    def ranks_of(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that have the shard with index `block`, ordered as in the device matrix.

        Raises:
            LayoutError: if no shard has this index.
        """
        if tuple(block) not in self._ranks_of_block:
            raise LayoutError(
                f"no shard has the index {tuple(block)}\n"
                f"use indices from 0 that are less than the numbers of shards {self.shard_counts}"
            )
        return self._ranks_of_block[tuple(block)]

    @cached_property
    def _ranks_of_block(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        positions = product(*(range(size) for size in self.device_matrix))
        # `ranks` are in row-major order, like the coordinates that `product` yields.
        for rank, coordinates in zip(self.layout.ranks, positions, strict=True):
            ranks_of.setdefault(self._compute_block_index(coordinates), []).append(rank)
        return {block: tuple(ranks) for block, ranks in ranks_of.items()}

    def on(self, mesh: DeviceMatrix) -> TensorLayout:
        """Return this layout on a device matrix with finer axes or another order of ranks.

        Raises:
            LayoutError: if `mesh` has other ranks, or an axis of this layout is not a product of
                axes of `mesh`.
        """
        fine_axes = _factor_coarse_axes(self.layout, mesh)

        def refine(axes: Iterable[int]) -> Axes:
            return tuple(fine for axis in axes for fine in fine_axes[axis])

        return TensorLayout(
            mesh,
            tuple(refine(dim) for dim in self.axes),
            frozenset(refine(self.partial)),
            frozenset(refine(self.varying)),
        )

    @property
    def placement(self) -> str:
        """The axes that shard each dimension as text, such as `(a, b·c; partial d)`."""
        named = self.layout.named
        dims = ", ".join(named(dim) or "None" for dim in self.axes)
        # Sorted: sets have no order, and equal layouts must have equal texts.
        suffix = f"; partial {named(sorted(self.partial), ' ')}" if self.partial else ""
        suffix += f"; varying {named(sorted(self.varying), ' ')}" if self.varying else ""
        return f"({dims}{suffix})"

    def __repr__(self) -> str:
        return f"{self.placement} on ({self.layout.sizes})"

    def _repr_html_(self) -> str:
        return f"<code>{self!r}</code>{self.visualize()._repr_html_()}"

    def visualize(self, shape: tuple[int, ...] | None = None) -> Drawing:
        """Draw a grid of the shards with the ranks of each; notebooks show it in color.

        Rows are the second-to-last dimension, columns the last. With more than two dimensions,
        draws one grid per index of the leading dimensions.

        Args:
            shape: global shape of the tensor, to label the edges with element ranges; None to label
                them with shard indices.

        Raises:
            LayoutError: if the layout cannot shard the shape.
        """
        sizes = self.shard_shape(shape) if shape is not None else None
        return draw_devices(self.shard_counts, sizes, self.ranks_of)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as JSON data; `partial` and `varying` are lists of axis names, omitted
        if empty."""
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


# Cached: the pins of an expert's plan repeat few pairs of device matrices in thousands of layouts,
# and the comparison of all ranks is slow with many of them.
@lru_cache(maxsize=1 << 10)
def _factor_coarse_axes(coarse: DeviceMatrix, fine: DeviceMatrix) -> tuple[Axes, ...]:
    """Return the axes of `fine` whose product is each axis of `coarse`, most significant first.

    Raises:
        LayoutError: if the ranks differ, or an axis of `coarse` is not a product of axes of `fine`.
    """
    # Their order may differ: it decides which fine axes make up a coarse one.
    if set(coarse.ranks) != set(fine.ranks):
        raise LayoutError(
            f"the device matrices {fine.device_matrix} and {coarse.device_matrix} do not have the"
            " same ranks\nuse device matrices with the same ranks"
        )
    # For each axis of `coarse`, pairs (-change of its coordinate, axis of `fine`).
    strides: list[list[tuple[int, int]]] = [[] for _ in coarse.device_matrix]
    step = fine.num_devices
    start = coarse.coordinates(fine.ranks[0])
    # Take one step along each axis of `fine`: the fine axis is part of the coarse axis whose
    # coordinate changes, and the larger the change, the more significant the fine axis is.
    for axis, size in enumerate(fine.device_matrix):
        step //= size
        # An axis with one device has no second device to step to.
        if size == 1:
            continue
        moved = coarse.coordinates(fine.ranks[step])
        deltas = [(a, new - old) for a, (old, new) in enumerate(zip(start, moved, strict=True))]
        for coarse_axis, delta in deltas:
            if delta:
                strides[coarse_axis].append((-delta, axis))
    fine_axes = tuple(tuple(axis for _, axis in sorted(axes)) for axes in strides)
    # The steps began at the first rank only; this compares the coordinates of all ranks.
    if not _is_refinement(coarse, fine, fine_axes):
        raise LayoutError(
            f"an axis of the device matrix {coarse.device_matrix} is not a product of axes of the"
            f" device matrix {fine.device_matrix}\nuse finer axes, such as (2, 2) for (4,)"
        )
    return fine_axes


def _is_refinement(coarse: DeviceMatrix, fine: DeviceMatrix, fine_axes: tuple[Axes, ...]) -> bool:
    """Whether every rank has the same coordinates on the axes of `coarse` and on the products of
    `fine_axes`."""
    if tuple(map(fine.size, fine_axes)) != coarse.device_matrix:
        return False
    used = [axis for axes in fine_axes for axis in axes]
    # Checked here, because `TensorLayout` raises for an axis that is used twice.
    if len(set(used)) != len(used):
        return False
    # A tensor with one dimension for each coarse axis: its shards have the coordinates as indices.
    products = TensorLayout(fine, fine_axes)
    return all(products.block(rank) == coarse.coordinates(rank) for rank in fine.ranks)


@lru_cache(maxsize=1 << 16)
def interned_layout(
    layout: DeviceMatrix,
    axes: tuple[Axes, ...],
    partial: frozenset[int] = frozenset(),
    varying: frozenset[int] = frozenset(),
) -> TensorLayout:
    """Return a `TensorLayout`; equal arguments give the same object.

    Searches use layouts as cache keys, and lookups of identical objects are fastest.
    """
    return TensorLayout(layout, axes, partial, varying)

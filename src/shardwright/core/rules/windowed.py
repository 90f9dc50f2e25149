"""Operators whose windows slide along sharded dimensions: convolution, pooling, `unfold`, padding.

A device computes the windows of its shard of a spatial dimension. Where windows cross the border of
a shard, the shard reads rows of its neighbors, the *halo*. Windows that do not cross borders, such
as patches, need no communication. At the outer borders of the first and the last shard, padding
replaces the halo.

The number of windows may differ from the number of rows divided by `stride`, as in a convolution
without padding. Then the windows of a shard do not begin at its first row: shards in the middle
receive rows of both neighbors, and each shard selects the rows of its windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, isqrt
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op, Value
from shardwright.core.rules.notation import WithArguments, argument_binder, call_arguments
from shardwright.core.rules.rule import NEXT, PREVIOUS, Dims, LocalSharding, Reduce, Reduction

_S = TypeVar("_S", bound="SlidingDim")

SPACE = ("s", "t", "u")
"""Factors of the spatial dimensions of an image."""


def largest_shard_count(size: int, is_valid: Callable[[int], bool]) -> int:
    """Return the largest divisor of `size` whose divisors are all valid shard counts.

    Args:
        size: number of rows or windows of a dimension.
        is_valid: whether a dimension supports the given shard count, above 1.
    """
    # Divisors come in pairs, one of each up to the square root.
    small = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    divisors = {*small, *(size // n for n in small)}
    valid = {n for n in divisors if n == 1 or is_valid(n)}
    # Every divisor of a capacity is a possible number of shards, so all of them must be valid.
    return max((n for n in valid if all(m in valid for m in divisors if n % m == 0)), default=1)


class SlidingDim(Protocol):
    """A dimension of an image along which windows slide or rows are resized (`interpolation`).

    Attributes:
        dim: the dimension.
        factor: factor of the dimension.
        capacity: number of windows that can be distributed; the shard count must divide it.

    The halo of a shard has `num_rows_before` rows of the previous shard and `num_rows_after` rows
    of the next shard, or of padding. The shard reads `num_rows` of its rows with halo, starting at
    index `halo_start`.
    """

    @property
    def dim(self) -> int: ...
    @property
    def factor(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    def num_rows_before(self, shards: int) -> int: ...
    def num_rows_after(self, shards: int) -> int: ...
    def num_rows(self, shards: int) -> int: ...
    def halo_start(self, index: Any, shards: int) -> Any: ...


@dataclass(frozen=True)
class Window:
    """A window that slides along one dimension.

    Args:
        dim: the dimension of the image.
        factor: factor of the dimension.
        extent: number of rows from the first to the last that a window reads.
        stride: number of rows between the beginnings of windows.
        padding: number of rows of padding before the first row.
        size: number of rows of the image, without padding.
        count: number of windows.
        margin: number of rows of a shard beyond its halo: 1 if padding mirrors the rows next to
            the border row, which is not repeated.
    """

    dim: int
    factor: str
    extent: int
    stride: int
    padding: int
    size: int
    count: int
    margin: int = 0

    def first_row(self, index: Any, shards: int) -> Any:
        """Return the global index of the first row that shard `index` of `shards` reads."""
        return index * (self.count // shards) * self.stride - self.padding

    def num_rows(self, shards: int) -> int:
        """Return the number of rows that a shard reads, padding included."""
        return (self.count // shards - 1) * self.stride + self.extent

    def halo_start(self, index: Any, shards: int) -> Any:
        """Return the index, among a shard's rows with halo, of the first row that it reads."""
        return (
            self.first_row(index, shards)
            - index * (self.size // shards)
            + self.num_rows_before(shards)
        )

    def num_rows_before(self, shards: int) -> int:
        """Return the number of rows of the previous shard, or of padding, in a halo."""
        rows = self.size // shards
        # Linear in the index, so the first and the last shard have the extremes.
        return max(0, *(i * rows - int(self.first_row(i, shards)) for i in (0, shards - 1)))

    def num_rows_after(self, shards: int) -> int:
        """Return the number of rows of the next shard, or of padding, in a halo."""
        rows, read = self.size // shards, self.num_rows(shards)
        # Linear in the index, so the first and the last shard have the extremes.
        ends = (int(self.first_row(i, shards)) + read for i in (0, shards - 1))
        return max(0, *(end - i * rows for i, end in zip((1, shards), ends, strict=True)))

    @property
    def capacity(self) -> int:
        """The number that the shard count must divide; 1 if the dimension cannot be sharded.

        The number divides the numbers of rows and of windows, and is small enough that a halo fits
        into one shard.
        """
        return largest_shard_count(
            gcd(self.size, self.count),
            lambda n: (
                max(self.num_rows_before(n), self.num_rows_after(n)) + self.margin <= self.size // n
            ),
        )


@dataclass(frozen=True)
class Padding:
    """Rows beyond the ends of a dimension, as `torch.nn.functional.pad` adds them.

    Args:
        mode: `constant`, `reflect`, `replicate` or `circular`, by which the first row follows the
            last.
        value: value of constant padding.
    """

    mode: str = "constant"
    value: float = 0.0

    def rows(self, x: Tensor, dim: int, count: int, *, in_front: bool) -> Tensor:
        """Return the `count` rows in front of `x` or, if not `in_front`, behind it."""
        size = x.shape[dim]
        if self.mode == "reflect":
            return x.narrow(dim, 1 if in_front else size - 1 - count, count).flip(dim)
        if self.mode == "circular":
            return x.narrow(dim, size - count if in_front else 0, count)
        row = x.narrow(dim, 0 if in_front else size - 1, 1)
        row = row if self.mode == "replicate" else torch.full_like(row, self.value)
        return row.expand(*x.shape[:dim], count, *x.shape[dim + 1 :])


ZEROS, CIRCULAR = Padding(), Padding("circular")


def input_windows(op: Op, kernel_size: Sequence[int]) -> tuple[Window, ...]:
    """Return the window of each spatial dimension of a convolution or pooling.

    Args:
        kernel_size: size of the kernel in each spatial dimension.
    """
    num_dims = len(kernel_size)
    return spatial_windows(op, kernel_size, op.inputs[0].shape, op.output.shape[-num_dims:])


def spatial_windows(
    op: Op, kernel_size: Sequence[int], image: Sequence[int], counts: Sequence[int]
) -> tuple[Window, ...]:
    """Return the window of each spatial dimension of an image.

    Args:
        kernel_size: size of the kernel in each spatial dimension.
        image: shape of the image.
        counts: number of windows in each spatial dimension.
    """
    arguments, num_dims = call_arguments(op), len(kernel_size)
    # An empty stride of a pooling means the size of the kernel.
    strides = expand_per_dim(arguments["stride"] or kernel_size, num_dims)
    dilations = expand_per_dim(arguments.get("dilation", 1), num_dims)
    # A dilated kernel reads every d-th row.
    extents = [d * (size - 1) + 1 for d, size in zip(dilations, kernel_size, strict=True)]
    first, padding = len(image) - num_dims, arguments.get("padding")
    if padding is None:
        # The pad of `padded_convolution` lists (before, after) of the last dimension first.
        paddings = [*arguments["pad"][::2], *(0,) * num_dims][:num_dims][::-1]
    elif isinstance(padding, str):
        # An odd row of padding goes after the last row.
        paddings = [(extent - 1) // 2 if padding == "same" else 0 for extent in extents]
    else:
        paddings = expand_per_dim(padding, num_dims)
    return tuple(
        Window(
            dim=first + n,
            factor=SPACE[n],
            extent=extents[n],
            stride=strides[n],
            padding=paddings[n],
            size=image[first + n],
            count=counts[n],
            margin=int(arguments.get("mode") == "reflect"),
        )
        for n in range(num_dims)
    )


def expand_per_dim(value: int | Sequence[int], num_dims: int) -> list[int]:
    """Return one number for each spatial dimension, given one number for all or a list."""
    values = [value] if isinstance(value, int) else list(value)
    return values * num_dims if len(values) == 1 else values


def spatial_factors(windows: Sequence[SlidingDim]) -> Dims:
    """Return the factor of each spatial dimension; None for a dimension that cannot be sharded."""
    return tuple(window.factor if window.capacity > 1 else None for window in windows)


def sharded_windows(windows: Sequence[_S], shard_counts: Mapping[str, int]) -> list[tuple[_S, int]]:
    """Return (window, number of shards) for each window along a sharded dimension."""
    counts = ((window, shard_counts.get(window.factor, 1)) for window in windows)
    return [(window, shards) for window, shards in counts if shards > 1]


def shard_shape(value: Value, dims: Dims, shard_counts: Mapping[str, int]) -> list[int]:
    """Return the shape of a shard of `value`.

    Args:
        dims: the factor of each dimension; None for a dimension that is not sharded.
        shard_counts: number of shards by factor.
    """
    pairs = zip(value.shape, dims, strict=True)
    return [size // shard_counts.get(factor or "", 1) for size, factor in pairs]


def halo_exchanges(
    value: Value, window: SlidingDim, shape: Sequence[int], halos: Iterable[tuple[int, str]]
) -> Iterator[Reduction]:
    """Yield the exchange of each halo of `value` along one dimension.

    Args:
        shape: shape of the exchanging shard in the other dimensions.
        halos: (number of rows, `PREVIOUS` or `NEXT`); no exchange for 0 rows.
    """
    for num_rows, operation in halos:
        if num_rows:
            halo = (*shape[: window.dim], num_rows, *shape[window.dim + 1 :])
            # `varying`: a neighbor's gradient of the rows it has read is sent back and added.
            yield Reduction(
                *((window.factor,), operation, halo, value.dtype),
                varying=True,
                differentiable=value.differentiable,
            )


def _replace_no_arguments(op: Op, local: LocalSharding) -> dict[str, Any]:
    return {}


def build_identity(op: Op, local: LocalSharding) -> Callable[[Any], Any]:
    """Return the identity, for kernels whose local outputs are those of the operator."""
    return lambda out: out


@dataclass(frozen=True)
class InputHalos:
    """Exchange of the input rows that windows of a shard read from its neighbors.

    Args:
        windows: windows along spatial dimensions.
        dims: factor of each dimension of the image.
        padding: the rows beyond the ends of the image.
        pads_all: whether the kernel also pads dimensions that are not sharded; otherwise the
            operator pads them.
        replace: returns the arguments that a shard's call replaces.
        finish: returns a function from the local outputs of the operator to those of the kernel.
    """

    windows: tuple[SlidingDim, ...]
    dims: Dims
    padding: Padding = ZEROS
    pads_all: bool = False
    replace: Callable[[Op, LocalSharding], dict[str, Any]] = _replace_no_arguments
    finish: Callable[[Op, LocalSharding], Callable[[Any], Any]] = build_identity

    @property
    def capacity(self) -> dict[str, int]:
        """Capacities: the number that the shard count of each factor of `windows` must divide."""
        return {w.factor: w.capacity for w in self.windows if w.capacity > 1}

    def reductions(self, op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
        """Return the exchanges of halos; the field `reductions` of a `ShardingRule`."""
        x = op.inputs[0]
        shape = shard_shape(x, self.dims, shard_counts)
        exchanges: list[Reduction] = []
        for window, shards in sharded_windows(self.windows, shard_counts):
            rows = (
                (window.num_rows_before(shards), PREVIOUS),
                (window.num_rows_after(shards), NEXT),
            )
            exchanges += halo_exchanges(x, window, shape, rows)
            # The next dimension has the halo of this one, so that corners are exchanged too.
            shape[window.dim] = window.num_rows(shards)
        return tuple(exchanges)

    def kernel(self, op: Op, local: LocalSharding) -> Callable[..., Any]:
        """Build the kernel that exchanges halos; the field `kernel` of a `ShardingRule`."""
        sharded, bind = sharded_windows(self.windows, local.shard_counts), argument_binder(op)
        replaced = self.replace(op, local)
        if not sharded:
            return WithArguments(op, **replaced) if replaced else op.target
        replaced |= self._remove_explicit_padding(op, [window for window, _ in sharded])
        borders, finish = self.borders(local), self.finish(op, local)
        unsharded = [
            _UnshardedPadding(window, self.padding)
            for window in self.windows
            if self.pads_all and local.shard_counts.get(window.factor, 1) == 1
        ]

        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(args, kwargs) | replaced
            # The image is the first argument of all these operators, under different names.
            name = next(iter(arguments))
            for border in borders:
                arguments[name] = border.extend(arguments[name])
            for padding in unsharded:
                arguments[name] = padding.extend(arguments[name])
            return finish(op.target(**arguments))

        return run

    def borders(self, local: LocalSharding) -> list[HaloExchange]:
        """Return the halo exchange of each sharded dimension."""
        # In the order in which `reductions` lists the exchanges.
        exchanges = iter(local.reduce)
        return [
            HaloExchange(
                *(window, shards, local.index(window.factor), self.padding),
                from_previous=next(exchanges) if window.num_rows_before(shards) else None,
                from_next=next(exchanges) if window.num_rows_after(shards) else None,
            )
            for window, shards in sharded_windows(self.windows, local.shard_counts)
        ]

    def _remove_explicit_padding(self, op: Op, sharded: Sequence[SlidingDim]) -> dict[str, Any]:
        # The exchange of halos has already padded.
        padding, pad = (call_arguments(op).get(name) for name in ("padding", "pad"))
        if pad is not None:
            # Pairs of the last dimension first.
            pairs = [len(self.dims) - 1 - window.dim for window in sharded]
            return {"pad": [0 if i // 2 in pairs else rows for i, rows in enumerate(pad)]}
        if padding is None:
            return {}
        if isinstance(padding, str):
            return {"padding": "valid"}
        # Dimensions that are not sharded are padded by the operator unless the kernel pads all.
        padded = self.windows if self.pads_all else sharded
        paddings = expand_per_dim(padding, len(self.windows))
        first = len(self.dims) - len(self.windows)
        for window in padded:
            paddings[window.dim - first] = 0
        return {"padding": paddings}


@dataclass(frozen=True)
class _UnshardedPadding:
    """Padding of one dimension that is not sharded.

    Args:
        window: window along the dimension.
        padding: the rows beyond the ends of the dimension.
    """

    window: SlidingDim
    padding: Padding

    def extend(self, x: Tensor) -> Tensor:
        """Return the image with padding, from the first to the last row that a window reads."""
        before, after = self.window.num_rows_before(1), self.window.num_rows_after(1)
        dim, rows = self.window.dim, self.padding.rows
        padded = torch.cat(
            [rows(x, dim, before, in_front=True), x, rows(x, dim, after, in_front=False)], dim
        )
        # With a stride above 1, windows may leave out the last rows.
        return padded.narrow(self.window.dim, 0, self.window.num_rows(1))


@dataclass(frozen=True)
class HaloExchange:
    """Halo exchange of an input in one sharded dimension: fetches the rows of the neighbors.

    Args:
        window: window along the dimension.
        shards: number of shards of the dimension.
        index: index of the local shard.
        padding: the rows beyond the ends of the dimension.
        from_previous: returns rows of the previous shard; None if the windows read no row of the
            previous shard.
        from_next: returns rows of the next shard; None if the windows read no row of the next
            shard.
    """

    window: SlidingDim
    shards: int
    index: Any
    padding: Padding
    from_previous: Reduce | None
    from_next: Reduce | None

    def extend(self, x: Tensor) -> Tensor:
        """Return the rows that the windows of the local shard read."""
        window, shards, blocks = self.window, self.shards, [x]
        dim, size = window.dim, x.shape[window.dim]
        before, after = window.num_rows_before(shards), window.num_rows_after(shards)
        if self.from_previous is not None:
            rows = self.from_previous(x.narrow(dim, size - before, before))
            blocks.insert(0, self._pad_at_outer_border(x, rows, in_front=True))
        if self.from_next is not None:
            rows = self.from_next(x.narrow(dim, 0, after))
            blocks.append(self._pad_at_outer_border(x, rows, in_front=False))
        extended = torch.cat(blocks, dim) if len(blocks) > 1 else x
        # Every row with its halo is read; otherwise windows shift against rows from shard to shard.
        if before + size + after == window.num_rows(shards):
            return extended
        start = window.halo_start(self.index, shards)
        return extended.narrow(dim, start, window.num_rows(shards))

    def _pad_at_outer_border(self, x: Tensor, rows: Tensor, *, in_front: bool) -> Tensor:
        # The exchange is a cycle: the outermost shards get each other's rows.
        if self.padding.mode == "circular":
            return rows
        border_shard = 0 if in_front else self.shards - 1
        is_outermost = torch.full((1,), border_shard, device=rows.device) == self.index
        dim = self.window.dim
        padding = self.padding.rows(x, dim, rows.shape[dim], in_front=in_front)
        return torch.where(is_outermost, padding, rows)

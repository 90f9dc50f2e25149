"""Operators whose windows slide along sharded dimensions: convolution and pooling.

A shard of a spatial dimension reads its neighbors' rows where windows cross its borders, the
*halo*. Where they do not, as for patches, nothing is sent. The first and the last shard have the
padding in place of a halo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import WithArguments, binder, call_arguments
from shardwright.core.rules.rule import NEXT, PREVIOUS, Dims, Local, Reduce, Reduction

SPACE = ("s", "t", "u")
"""Factors of the spatial dimensions of an image."""


@dataclass(frozen=True)
class Window:
    """A window that slides along one dimension.

    Args:
        dim: the dimension of the image.
        factor: factor of the dimension.
        extent: number of rows from the first to the last that a window reads.
        stride: number of rows between the beginnings of windows.
        padding: number of rows of padding before the first row.
        size: number of rows.
        count: number of windows.
    """

    dim: int
    factor: str
    extent: int
    stride: int
    padding: int
    size: int
    count: int

    @property
    def before(self) -> int:
        """Number of rows that a shard reads of the previous shard."""
        return self.padding

    @property
    def after(self) -> int:
        """Number of rows that a shard reads of the next shard."""
        return max(self.extent - self.stride - self.padding, 0)

    @property
    def capacity(self) -> int:
        """The number that the shard count must divide; 1 if the dimension cannot be sharded.

        Shards of the input and of the output are aligned if each window has `stride` rows of its
        own, and a halo has to fit into one shard.
        """
        if self.size != self.count * self.stride or self.padding >= self.extent:
            return 1
        halo = max(self.before, self.after)
        counts = range(self.count, 0, -1)
        return next(n for n in counts if self.count % n == 0 and (self.size // n >= halo or n == 1))


def windows_of(op: Op, kernel_size: Sequence[int]) -> tuple[Window, ...]:
    """Return the window of each spatial dimension of a convolution or pooling that can be sharded.

    Args:
        kernel_size: size of the kernel in each spatial dimension.
    """
    arguments = call_arguments(op)
    if isinstance(arguments["padding"], str) or arguments.get("ceil_mode"):
        return ()
    if any(arguments["padding"]) and arguments.get("count_include_pad") is False:
        return ()
    num_dims = len(kernel_size)
    strides = _per_dim(arguments["stride"] or kernel_size, num_dims)
    paddings = _per_dim(arguments["padding"], num_dims)
    dilations = _per_dim(arguments.get("dilation", 1), num_dims)
    x, first = op.inputs[0], len(op.inputs[0].shape) - num_dims
    windows = (
        Window(
            dim=first + n,
            factor=SPACE[n],
            extent=dilations[n] * (kernel_size[n] - 1) + 1,
            stride=strides[n],
            padding=paddings[n],
            size=x.shape[first + n],
            count=op.output.shape[first + n],
        )
        for n in range(num_dims)
    )
    return tuple(window for window in windows if window.capacity > 1)


def patches_of(op: Op, kernel_size: Sequence[int]) -> dict[int, tuple[str, int]]:
    """Return the factor and the capacity of each spatial dimension in which a transposed
    convolution writes patches that do not overlap.

    Args:
        kernel_size: size of the kernel in each spatial dimension.
    """
    arguments, num_dims = call_arguments(op), len(kernel_size)
    names = ("stride", "padding", "output_padding", "dilation")
    options = zip(*(_per_dim(arguments[name], num_dims) for name in names), strict=True)
    first, x = len(op.output.shape) - num_dims, op.inputs[0]
    return {
        first + n: (SPACE[n], x.shape[first + n])
        for n, (size, option) in enumerate(zip(kernel_size, options, strict=True))
        if option == (size, 0, 0, 1)
    }


def _per_dim(value: int | Sequence[int], num_dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * num_dims if len(values) == 1 else values


def _nothing(op: Op, local: Local) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Windowed:
    """The halos of an operator on images.

    Args:
        windows: windows along dimensions that can be sharded.
        dims: factor of each dimension of the image.
        num_spatial: number of spatial dimensions, the last ones.
        padding_value: value of padding.
        replace: returns the arguments that differ on a shard from those of the operator.
    """

    windows: tuple[Window, ...]
    dims: Dims
    num_spatial: int
    padding_value: float = 0.0
    replace: Callable[[Op, Local], dict[str, Any]] = _nothing

    @property
    def capacity(self) -> dict[str, int]:
        """Capacity of each factor of `windows`."""
        return {window.factor: window.capacity for window in self.windows}

    def reductions(self, op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
        """Return the exchanges of halos, for `ShardingRule.reductions`."""
        x = op.inputs[0]
        shape = [
            size // shard_counts.get(factor or "", 1)
            for size, factor in zip(x.shape, self.dims, strict=True)
        ]
        exchanges = []
        for window in self._sharded(shard_counts):
            for rows, kind in ((window.before, PREVIOUS), (window.after, NEXT)):
                if rows:
                    halo = (*shape[: window.dim], rows, *shape[window.dim + 1 :])
                    exchanges.append(
                        Reduction(
                            *((window.factor,), kind, halo, x.dtype),
                            varying=True,
                            differentiable=x.differentiable,
                        )
                    )
            # The next dimension has the halo of this one, so that corners are exchanged too.
            shape[window.dim] += window.before + window.after
        return tuple(exchanges)

    def _sharded(self, shard_counts: Mapping[str, int]) -> list[Window]:
        return [window for window in self.windows if shard_counts.get(window.factor, 1) > 1]

    def kernel(self, op: Op, local: Local) -> Callable[..., Any]:
        """Build the kernel, for `ShardingRule.kernel`."""
        windows, bind = self._sharded(local.shard_counts), binder(op)
        replaced = self.replace(op, local)
        if not windows:
            return WithArguments(op, **replaced) if replaced else op.target
        paddings = _per_dim(call_arguments(op)["padding"], self.num_spatial)
        first = len(self.dims) - self.num_spatial
        for window in windows:
            paddings[window.dim - first] = 0
        replaced["padding"] = paddings
        exchanges, borders = iter(local.reduce), list[_Border]()
        for window in windows:
            count, index = local.shard_counts[window.factor], local.index(window.factor)
            previous = next(exchanges) if window.before else None
            following = next(exchanges) if window.after else None
            borders.append(_Border(window, previous, following, index, count, self.padding_value))

        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(args, kwargs) | replaced
            name = next(iter(arguments))
            for border in borders:
                arguments[name] = border.extend(arguments[name])
            return op.target(**arguments)

        return run


@dataclass(frozen=True)
class _Border:
    """The halo of one sharded dimension.

    Args:
        window: window along the dimension.
        previous, following: exchanges with the previous and with the next shard; None without.
        index, count: index of this shard, and number of shards.
        padding_value: value of padding.
    """

    window: Window
    previous: Reduce | None
    following: Reduce | None
    index: Any
    count: int
    padding_value: float

    def extend(self, x: Tensor) -> Tensor:
        """Return the local shard with its halo."""
        dim, size, parts = self.window.dim, x.shape[self.window.dim], [x]
        if self.previous is not None:
            rows = self.previous(x.narrow(dim, size - self.window.before, self.window.before))
            parts.insert(0, self._pad_at(rows, 0))
        if self.following is not None:
            rows = self.following(x.narrow(dim, 0, self.window.after))
            parts.append(self._pad_at(rows, self.count - 1))
        return torch.cat(parts, dim)

    def _pad_at(self, rows: Tensor, index: int) -> Tensor:
        # The exchange is a cycle: the outermost shards get each other's rows.
        is_outermost = torch.full((1,), index, device=rows.device) == self.index
        return rows.masked_fill(is_outermost, self.padding_value)

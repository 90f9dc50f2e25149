"""Operators that add up overlapping windows along sharded dimensions, such as `fold`.

Each device computes its shard of the windows. Rows of a neighbor's shard that these windows write
are sent to the neighbor, which adds them to its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import WithArguments, argument_binder, call_arguments
from shardwright.core.rules.rule import NEXT, PREVIOUS, Dims, LocalSharding, Reduce, Reduction
from shardwright.core.rules.windowed import (
    Window,
    expand_per_dim,
    halo_exchanges,
    shard_shape,
    sharded_windows,
)


def _replace_no_arguments(op: Op, local: LocalSharding) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class OutputHalos:
    """Halo exchange of an operator whose windows write output rows in the shards of neighbors.

    Args:
        windows: one window of output rows per spatial dimension: each input row contributes to the
            rows of a window, as in a transposed convolution.
        dims: factor of each dimension of the output.
        replace: returns the arguments that a shard's call replaces.
    """

    windows: tuple[Window, ...]
    dims: Dims
    replace: Callable[[Op, LocalSharding], dict[str, Any]] = _replace_no_arguments

    @property
    def capacity(self) -> dict[str, int]:
        """Capacities: the number that the shard count of each factor of `windows` must divide."""
        return {w.factor: w.capacity for w in self.windows if w.capacity > 1}

    def reductions(self, op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
        """Return the exchanges of halo rows; the field `reductions` of a `ShardingRule`."""
        shape = shard_shape(op.output, self.dims, shard_counts)
        sharded = sharded_windows(self.windows, shard_counts)
        # Rows of corners go through the neighbor in the first dimension to that in the next.
        for window, shards in sharded:
            shape[window.dim] += window.num_rows_before(shards) + window.num_rows_after(shards)
        exchanges: list[Reduction] = []
        for window, shards in sharded:
            rows = (
                # Rows in front of a shard belong to the previous one, which receives them from its
                # next.
                (window.num_rows_before(shards), NEXT),
                (window.num_rows_after(shards), PREVIOUS),
            )
            exchanges += halo_exchanges(op.output, window, shape, rows)
            # This exchange has added the halo of its dimension, which later ones do not send.
            shape[window.dim] = window.size // shards
        return tuple(exchanges)

    def kernel(self, op: Op, local: LocalSharding) -> Callable[..., Any]:
        """Build the kernel that exchanges halo rows; the field `kernel` of a `ShardingRule`."""
        sharded, bind = sharded_windows(self.windows, local.shard_counts), argument_binder(op)
        replaced = self.replace(op, local)
        if not sharded:
            return WithArguments(op, **replaced) if replaced else op.target
        # In sharded dimensions this kernel crops the border, since the operator's padding would
        # crop rows that belong to neighbors.
        replaced |= self._replace_padding_by_zero(op, [window for window, _ in sharded])
        # In the order in which `reductions` lists the exchanges.
        exchanges = iter(local.reduce)
        borders = [
            _OutputHaloExchange(
                *(window, shards, local.index(window.factor)),
                from_next=next(exchanges) if window.num_rows_before(shards) else None,
                from_previous=next(exchanges) if window.num_rows_after(shards) else None,
            )
            for window, shards in sharded
        ]

        def run(*args: Any, **kwargs: Any) -> Tensor:
            arguments = bind(args, kwargs) | replaced
            # Each row of the output has the bias once, however many shards write it.
            bias = arguments.get("bias")
            if bias is not None:
                arguments["bias"] = None
            out: Tensor = op.target(**arguments)
            # All dimensions are padded before the first exchange, so that corners reach diagonal
            # neighbors.
            for border in borders:
                out = border.pad_to_halo(out)
            for border in borders:
                out = border.exchange(out)
            return out if bias is None else out + bias.view(-1, *(1,) * len(self.windows))

        return run

    def _replace_padding_by_zero(self, op: Op, sharded: list[Window]) -> dict[str, Any]:
        replaced: dict[str, Any] = {}
        first = len(self.dims) - len(self.windows)
        for name in ("padding", "output_padding"):
            if name in call_arguments(op):
                values = expand_per_dim(call_arguments(op)[name], len(self.windows))
                for window in sharded:
                    values[window.dim - first] = 0
                replaced[name] = values
        return replaced


@dataclass(frozen=True)
class _OutputHaloExchange:
    """Halo exchange of an output in one sharded dimension: sends the halo rows to the neighbors.

    The *halo rows* are output rows that a shard computes but a neighboring shard owns.

    Args:
        window: window along the dimension.
        shards: number of shards of the dimension.
        index: index of the local shard.
        from_next: sends halo rows to the previous shard and returns halo rows of the next shard;
            None if the windows do not overlap in this direction.
        from_previous: sends halo rows to the next shard and returns halo rows of the previous
            shard; None if the windows do not overlap in this direction.
    """

    window: Window
    shards: int
    index: Any
    from_next: Reduce | None
    from_previous: Reduce | None

    def pad_to_halo(self, x: Tensor) -> Tensor:
        """Return the rows of this shard and its halo, 0 where this shard writes nothing."""
        window, shards, read = self.window, self.shards, self.window.num_rows(self.shards)
        length = (
            window.num_rows_before(shards) + window.size // shards + window.num_rows_after(shards)
        )
        if length == read:
            return x
        starts = [window.halo_start(i, shards) for i in (0, shards - 1)]
        # Every shard is padded by equally many zeros, since shapes must not depend on its index.
        before, after = max(starts), max(length - start - read for start in starts)
        trailing = (0, 0) * (x.ndim - 1 - window.dim)
        padded = functional.pad(x, (*trailing, before, after))
        return padded.narrow(window.dim, before - window.halo_start(self.index, shards), length)

    def exchange(self, x: Tensor) -> Tensor:
        """Return the rows of this shard, to which the rows computed by its neighbors are added."""
        window, dim, size = self.window, self.window.dim, self.window.size // self.shards
        before, after = window.num_rows_before(self.shards), window.num_rows_after(self.shards)
        out, trailing = x.narrow(dim, before, size), (0, 0) * (x.ndim - 1 - dim)
        if self.from_next is not None:
            rows = self._zero_rows_at_outer_border(
                self.from_next(x.narrow(dim, 0, before)), self.shards - 1
            )
            out = out + functional.pad(rows, (*trailing, size - before, 0))
        if self.from_previous is not None:
            rows = self._zero_rows_at_outer_border(
                self.from_previous(x.narrow(dim, before + size, after)), 0
            )
            out = out + functional.pad(rows, (*trailing, 0, size - after))
        return out

    def _zero_rows_at_outer_border(self, rows: Tensor, border_shard: int) -> Tensor:
        # The exchange is a cycle: the outermost shards get rows of each other's padding.
        is_outermost = torch.full((1,), border_shard, device=rows.device) == self.index
        return rows.masked_fill(is_outermost, 0)

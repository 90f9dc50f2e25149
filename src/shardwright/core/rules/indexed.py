"""Kernels of operators that index sharded dimensions: each device reads or writes its own shard.

A read (`x[i]`, `gather`) gives 0 for an index in another device's shard, so that the results are
partial sums, as in the vocabulary-parallel embedding of Megatron-LM. A write (`scatter`,
`index_add`) into another device's shard goes to an additional row, which is dropped.

Rows that are added (`scatter_add`), such as the messages along the edges of a graph, can be sharded
too: each device adds its rows, and the results are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import argument, argument_binder, schema_parameters
from shardwright.core.rules.rule import Kernel, LocalSharding
from shardwright.core.rules.scattered import ScatteredRows, neutral_element


def other_shard_mask(indices: Tensor, first: Any, size: int, total: int) -> Tensor:
    """Return a mask of the indices that are in other devices' shards.

    An index out of range is not masked, so that every device raises the error of the lookup.

    Args:
        indices: indices into the full dimension.
        first, size: first index and size of this device's shard.
        total: size of the full dimension.
    """
    in_this_block: Tensor = (indices >= first) & (indices < first + size)
    in_range: Tensor = (indices >= 0) & (indices < total)
    return in_range & ~in_this_block


@dataclass(frozen=True)
class IndexedDims:
    """Dimensions that an operator such as `gather` or `scatter` indexes in its first input.

    Args:
        argument: name of the argument with the indices: a tensor or a list of tensors.
        factors: factor of each indexed dimension, by dimension.
        is_list: whether the argument is a list with one index per dimension; negative indices then
            count from the end.
        trailing: number of dimensions of the output that follow the dimensions of the indices.
        added: factors of the rows that the operator adds to its first input; the results are
            partial sums over shards of the rows. () if rows are overwritten or read.
    """

    argument: str
    factors: Mapping[int, str]
    is_list: bool = False
    trailing: int = 0
    added: tuple[str, ...] = ()

    def read_kernel(self) -> Kernel:
        """Return the builder of a kernel that reads elements at the indices, such as `gather`."""
        return lambda op, local: self._build_indexed_kernel(op, local, self._read_local_elements)

    def write_kernel(self, rows: ScatteredRows | None = None) -> Kernel:
        """Return the builder of a kernel that writes elements at the indices, such as `scatter`; at
        most one indexed dimension can be sharded.

        Args:
            rows: reduction of the rows; None if they overwrite or are added.
        """

        def build(op: Op, local: LocalSharding) -> Callable[..., Any]:
            target = op.target if rows is None else rows.target(op, local)
            write = self._build_indexed_kernel(op, local, self._write_local_elements, target)
            sharded = [factor for factor in self.added if local.shard_counts.get(factor, 1) > 1]
            return (
                self._add_first_input_on_first_shard_only(op, local, write, sharded)
                if sharded
                else write
            )

        return build

    def _add_first_input_on_first_shard_only(
        self, op: Op, local: LocalSharding, write: Callable[..., Any], sharded: Sequence[str]
    ) -> Callable[..., Any]:
        """Wrap `write`, a kernel that adds rows to its first input, for sharded rows.

        Only the first shard of the rows adds to the first input, the others to zeros or other
        neutral elements: the sum over devices then includes the first input once.
        """
        bind, shards = argument_binder(op), [local.index(factor) for factor in sharded]
        neutral = neutral_element(argument(op, "reduce", "sum"), op.output.dtype)
        name = next(iter(schema_parameters(op.target)))

        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(args, kwargs)
            x = arguments[name]
            # As tensors, because a simulated rank has an index of its own in each `SymInt`.
            zero = torch.zeros((), dtype=torch.int64, device=x.device)
            for shard in shards:
                x = x.masked_fill(zero + shard != 0, neutral)
            return write(**{**arguments, name: x})

        return run

    def _build_indexed_kernel(
        self,
        op: Op,
        local: LocalSharding,
        function: Callable[..., Any],
        target: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        target = op.target if target is None else target
        blocks = {}
        for dim, factor in self.factors.items():
            if local.shard_counts.get(factor, 1) > 1:
                total = op.inputs[0].shape[dim]
                size = total // local.shard_counts[factor]
                # `x[i]` counts negative indices from the end; `gather`, `scatter` and `index_add`
                # refuse them.
                blocks[dim] = LocalIndexRange(
                    local.index(factor) * size, size, total, wraps=self.is_list
                )
        if not blocks:
            return target
        bind = argument_binder(op)
        # Bound by name, as callers may pass the tensors of ATen operators by name.
        return lambda *args, **kwargs: function(target, blocks, bind(args, kwargs))

    def _read_local_elements(
        self,
        target: Callable[..., Any],
        blocks: Mapping[int, LocalIndexRange],
        arguments: dict[str, Any],
    ) -> Tensor:
        elsewhere: Tensor | None = None
        for dim, block in blocks.items():
            index, is_elsewhere = block.localize(self._get_index_argument_of_dim(arguments, dim))
            # Any valid row, since the result is masked.
            self._replace_index_argument_of_dim(arguments, dim, index.masked_fill(is_elsewhere, 0))
            elsewhere = is_elsewhere if elsewhere is None else elsewhere | is_elsewhere
        assert elsewhere is not None
        # Broadcasting aligns on the right, so the dimensions behind those of the indices are added.
        mask = elsewhere.reshape((*elsewhere.shape, *(1,) * self.trailing))
        out: Tensor = target(**arguments)
        return out.masked_fill(mask, 0)

    def _write_local_elements(
        self,
        target: Callable[..., Any],
        blocks: Mapping[int, LocalIndexRange],
        arguments: dict[str, Any],
    ) -> Tensor:
        ((dim, block),) = blocks.items()
        index, elsewhere = block.localize(self._get_index_argument_of_dim(arguments, dim))
        self._replace_index_argument_of_dim(arguments, dim, index)
        if "reduce" in arguments and isinstance(source := arguments.get("src"), Tensor):
            # The gradient of the row that is dropped would be NaN, as 0 times its value is, if a
            # product of other devices' rows overflows or one of them is NaN.
            neutral = neutral_element(arguments["reduce"], source.dtype)
            rows = tuple(map(slice, index.shape))
            arguments["src"] = source[rows].masked_fill(elsewhere, neutral)
        name = next(iter(arguments))
        x = arguments[name]
        # One more row, which indices of other devices write, and which is dropped. Its elements are
        # ones, as `scatter_reduce` of products divides by them in its backward pass.
        arguments[name] = torch.cat([x, torch.ones_like(x.narrow(dim, 0, 1))], dim)
        out: Tensor = target(**arguments)
        return out.narrow(dim, 0, block.size)

    def _get_index_argument_of_dim(self, arguments: Mapping[str, Any], dim: int) -> Tensor:
        index: Tensor = arguments[self.argument][dim] if self.is_list else arguments[self.argument]
        return index

    def _replace_index_argument_of_dim(
        self, arguments: dict[str, Any], dim: int, index: Tensor
    ) -> None:
        if self.is_list:
            # A copy: the list belongs to the caller.
            indices = list(arguments[self.argument])
            indices[dim] = index
            arguments[self.argument] = indices
        else:
            arguments[self.argument] = index


@dataclass(frozen=True)
class LocalIndexRange:
    """This device's shard of a dimension, for lookups by index.

    Args:
        first: index of the first element.
        size: number of elements.
        total: number of elements on all devices.
        wraps: whether negative indices count from the end of the dimension.
    """

    first: Any
    size: int
    total: int
    wraps: bool = False

    def localize(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices relative to this shard, and a mask of the indices in other shards.

        An index in another shard is replaced by `size`. An index that is out of range on all
        devices is replaced by `size + 1`, so that every device raises the error that a single
        device would.
        """
        index = index.long()
        if self.wraps:
            index = torch.where(index < 0, index + self.total, index)
        elsewhere = other_shard_mask(index, self.first, self.size, self.total)
        local = (index - self.first).masked_fill(elsewhere, self.size)
        out_of_range = (index < 0) | (index >= self.total)
        return local.masked_fill(out_of_range, self.size + 1), elsewhere


def one_hot_kernel(factor: str) -> Kernel:
    """Return the builder of the kernel of `one_hot`, whose classes are sharded by `factor`."""

    def build(op: Op, local: LocalSharding) -> Callable[..., Any]:
        count = local.shard_counts.get(factor, 1)
        if count == 1:
            return op.target
        classes = op.output.shape[-1]
        size = classes // count
        block = LocalIndexRange(local.index(factor) * size, size, classes)

        def run(x: Tensor, num_classes: int) -> Tensor:
            # One more class, for all classes of other devices.
            index, _ = block.localize(x)
            out: Tensor = op.target(index, size + 1)
            return out.narrow(-1, 0, size)

        return run

    return build

"""Operators that concatenate, split or index along a dimension, which cannot be sharded."""

from __future__ import annotations

import torch

from shardwright.core.graph.graph import Op, Value
from shardwright.core.rules.notation import (
    NAMES,
    argument,
    names,
    overloads,
    sharding_rule,
    without,
)
from shardwright.core.rules.rule import Dims, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(*overloads("cat", "concat", "concatenate"))
def cat(op: Op) -> ShardingRule:
    """Concatenation, `b _, b _ -> b _`: all but the concatenated dimension can be sharded.

    As in torch, some inputs may be empty one-dimensional tensors.
    """
    dims = without(names(op.output), argument(op, "dim"))
    inputs = [dims if len(v.shape) == len(dims) else (None,) for v in op.inputs]
    return sharding_rule(op, inputs, (dims,))


@rule_for(*overloads("stack"))
def stack(op: Op) -> ShardingRule:
    """Stacking, `b s, b s -> b _ s`: all but the new dimension can be sharded."""
    dim = argument(op, "dim") % len(op.output.shape)
    dims = without(names(op.output), dim)
    return sharding_rule(op, [_without_dim(dims, dim)] * len(op.inputs), (dims,))


@rule_for(*overloads("split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split"))
@rule_for(*overloads("unsafe_split_with_sizes", "narrow"))
@rule_for(aten.split.Tensor, aten.split.sizes, aten.split.default)
@rule_for(aten.tensor_split.sections, aten.tensor_split.indices)
def split_rule(op: Op) -> ShardingRule:
    """Split, `b _ -> b _, b _`: all but the split dimension can be sharded."""
    dims = without(names(op.inputs[0]), argument(op, "dim"))
    others = [(None,) * len(value.shape) for value in op.inputs[1:]]
    return sharding_rule(op, (dims, *others), (dims,) * len(op.outputs))


@rule_for(aten.unbind.int, aten.select.int)
def unbind(op: Op) -> ShardingRule:
    """Unbinding or selection, `b _ s -> b s`: all but the removed dimension can be sharded."""
    x = op.inputs[0]
    dim = argument(op, "dim") % len(x.shape)
    dims = without(names(x), dim)
    return sharding_rule(op, (dims,), (_without_dim(dims, dim),) * len(op.outputs))


@rule_for(aten.slice.Tensor)
def slice_rule(op: Op) -> ShardingRule:
    """Slice, `b _ -> b _`, or `b s -> b s` for a slice over the full dimension."""
    x, dim = op.inputs[0], argument(op, "dim")
    # `x[:, :]` is exported as slices over full dimensions; these must not keep a dimension
    # replicated.
    is_full = op.output.shape == x.shape and argument(op, "step") == 1
    dims = names(x) if is_full else without(names(x), dim)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("select_scatter", "slice_scatter"))
def slice_scatter_rule(op: Op) -> ShardingRule:
    """Write of a slice, `b _, b _ -> b _` (`slice_scatter`) or `b _, b -> b _` (`select_scatter`):
    the dimension in which the source is written cannot be sharded."""
    x, source = op.inputs
    dim = argument(op, "dim") % len(x.shape)
    dims = without(names(x), dim)
    written = dims if len(source.shape) == len(x.shape) else _without_dim(dims, dim)
    return sharding_rule(op, (dims, written), (dims,))


@rule_for(*overloads("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d"))
@rule_for(*overloads("reflection_pad3d", "replication_pad1d", "replication_pad2d"))
@rule_for(*overloads("replication_pad3d"))
def pad(op: Op) -> ShardingRule:
    """Padding, `b s _ -> b s _`: padded (or cropped) dimensions cannot be sharded."""
    # `pad` lists (before, after) of each dimension, the last dimension first.
    amounts = argument(op, "pad", argument(op, "padding"))
    padded = [-1 - i // 2 for i, amount in enumerate(amounts) if amount != 0]
    dims = without(names(op.output), *padded)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("one_hot"))
def one_hot(op: Op) -> ShardingRule | None:
    """One-hot encoding, `b s -> b s _`; None if the number of classes is inferred from the data,
    which differs between shards."""
    if argument(op, "num_classes") < 0:
        return None
    dims = names(op.inputs[0])
    return sharding_rule(op, (dims,), ((*dims, None),))


@rule_for(*overloads("meshgrid"))
def meshgrid(op: Op) -> ShardingRule:
    """Mesh grid, `b, s -> b s, b s`: each input is one dimension of all outputs.

    `indexing="xy"` swaps the first two dimensions of the outputs.
    """
    dims = names(op.output)
    axes = list(range(len(dims)))
    if argument(op, "indexing", "ij") == "xy" and len(axes) > 1:
        axes[:2] = 1, 0
    inputs = [(dims[axis],)[: len(v.shape)] for axis, v in zip(axes, op.inputs, strict=True)]
    return sharding_rule(op, inputs, (dims,) * len(op.outputs))


@rule_for(*overloads("gather", "take_along_dim"))
def gather(op: Op) -> ShardingRule | None:
    """Gather, `b _, b s -> b s`: indices can be sharded; the dimension that they index cannot.

    None without `dim`, which flattens the tensors.
    """
    x, indices = op.inputs
    dim = argument(op, "dim")
    if dim is None or len(x.shape) != len(indices.shape) or not x.shape:
        return None
    indexed_dim = dim % len(x.shape)
    # Where the index is smaller than `x`, only the first elements of `x` are read: shards of `x`
    # and of the index would not be aligned.
    unequal = [
        i for i, sizes in enumerate(zip(x.shape, indices.shape, strict=True)) if _are_unequal(sizes)
    ]
    dims = without(names(x), *(i for i in unequal if i != indexed_dim))
    return sharding_rule(op, (without(dims, indexed_dim), dims), (dims,))


@rule_for(*overloads("scatter", "scatter_add", "scatter_reduce"))
def scatter(op: Op) -> ShardingRule:
    """Scatter, `b _, b _, b _ -> b _`: dimensions in which all tensors have the same size can be
    sharded, except the indexed one."""
    x, *others = op.inputs
    shapes = [x.shape, *(value.shape for value in others if value.shape)]
    unequal = [i for i, sizes in enumerate(zip(*shapes, strict=False)) if _are_unequal(sizes)]
    dims = without(names(x), argument(op, "dim"), *unequal)
    inputs = [dims if len(value.shape) == len(dims) else () for value in op.inputs]
    return sharding_rule(op, inputs, (dims,))


@rule_for(*overloads("take"))
def take(op: Op) -> ShardingRule:
    """Lookup in a flattened tensor, `_ _, b -> b`: the indices can be sharded; the flattened tensor
    that they index cannot."""
    dims = names(op.inputs[1])
    return sharding_rule(op, ((None,) * len(op.inputs[0].shape), dims), (dims,))


@rule_for(*overloads("index_select"))
def index_select(op: Op) -> ShardingRule:
    """Selection by index, `b _, s -> b s`: the index can be sharded; the dimension that it indexes
    cannot."""
    x, indices = op.inputs
    dims = names(x)
    if not dims:
        return sharding_rule(op, ((), (None,) * len(indices.shape)), ((),))
    dim = argument(op, "dim") % len(dims)
    index_dims = (dims[dim],)[: len(indices.shape)]
    out = dims if index_dims else without(dims, dim)
    return sharding_rule(op, (without(dims, dim), index_dims), (out,))


@rule_for(*overloads("index_add", "index_copy", "index_reduce", "index_fill"))
def index_add_rule(op: Op) -> ShardingRule | None:
    """Update by index, `b _, _, b _ -> b _`: the dimension into which the index writes cannot be
    sharded."""
    x, indices, *source = op.inputs
    if not x.shape:
        return None
    dims = without(names(x), argument(op, "dim"))
    written = [dims if len(value.shape) == len(dims) else () for value in source]
    return sharding_rule(op, (dims, (None,) * len(indices.shape), *written), (dims,))


@rule_for(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(op: Op) -> ShardingRule | None:
    """Indexing by tensors, `_ s, b -> b s`: indexed dimensions cannot be sharded, dimensions of the
    index tensors can.

    None for masks: the shape of the result depends on the data.
    """
    dims = _indexing_factors(op)
    if dims is None:
        return None
    source, at, result = dims
    indices = [at[len(at) - len(value.shape) :] for value in op.inputs[1:]]
    return sharding_rule(op, (source, *indices), (result,))


@rule_for(aten.index_put.default)
def index_put(op: Op) -> ShardingRule | None:
    """Assignment by index tensors, `_ s, _, _ s -> _ s`: dimensions that are not indexed can be
    sharded; None for masks."""
    dims = _indexing_factors(op)
    if dims is None:
        return None
    source, at, result = dims
    *indices, values = op.inputs[1:]
    # With sharded indices each device would write only some of the rows of its copy.
    written = tuple(None if name in at else name for name in result)
    replicated = [(None,) * len(value.shape) for value in indices]
    return sharding_rule(
        op, (source, *replicated, written[len(written) - len(values.shape) :]), (source,)
    )


def _indexing_factors(op: Op) -> tuple[Dims, Dims, Dims] | None:
    """Return the factors of `x`, of the broadcast indices and of the output of `x[indices]`.

    As in NumPy, the dimensions of the indices replace the indexed dimensions, or come first if the
    indexed dimensions are not adjacent. Returns None if an index is a mask, or there is no index.
    """
    x, indices = op.args[0], list(op.args[1])
    indexed = [i for i, index in enumerate(indices) if index is not None]
    index_values = [value for value in indices if isinstance(value, Value)]
    if not indexed or any(value.dtype in (torch.bool, torch.uint8) for value in index_values):
        return None
    source = without(names(x), *indexed)
    unused = [name for name in NAMES if name not in names(x)]
    at: Dims = tuple(unused[: max(len(value.shape) for value in index_values)])
    first, last = indexed[0], indexed[-1]
    if indexed == list(range(first, last + 1)):
        return source, at, (*source[:first], *at, *source[last + 1 :])
    remaining = tuple(name for i, name in enumerate(source) if i not in indexed)
    return source, at, (*at, *remaining)


def _are_unequal(sizes: tuple[int, ...]) -> bool:
    return len(set(sizes)) > 1


def _without_dim(dims: Dims, dim: int) -> Dims:
    return (*dims[:dim], *dims[dim + 1 :])

"""Operators that index along a dimension, or make and remove one.

A dimension that indices select can be sharded (`indexed.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op, Value
from shardwright.core.rules.indexed import IndexedDims, one_hot_kernel
from shardwright.core.rules.moved import slice_of_consecutive_rows
from shardwright.core.rules.notation import (
    NAMES,
    WithArguments,
    argument,
    call_arguments,
    factor_names,
    overloads,
    sharding_rule,
    unsharded_at,
)
from shardwright.core.rules.rule import Dims, LocalSharding, ShardingRule, rule_for
from shardwright.core.rules.scattered import EXTREMES, ScatteredRows

aten = torch.ops.aten

_ADDING_WRITES = overloads("scatter_add", "index_add")


@rule_for(*overloads("stack"))
def stack(op: Op) -> ShardingRule:
    """Stacking, `b s, b s -> b _ s`: all but the new dimension can be sharded."""
    dim = argument(op, "dim") % len(op.output.shape)
    dims = unsharded_at(factor_names(op.output), dim)
    return sharding_rule(op, [_remove_dim(dims, dim)] * len(op.inputs), (dims,))


@rule_for(*overloads("narrow"))
def narrow(op: Op) -> ShardingRule:
    """Slice whose start may be a tensor, `b _ -> b _`: the sliced dimension cannot be sharded."""
    dims = unsharded_at(factor_names(op.inputs[0]), argument(op, "dim"))
    return sharding_rule(op, (dims, *((None,) * len(v.shape) for v in op.inputs[1:])), (dims,))


@rule_for(aten.select.int)
def select(op: Op) -> ShardingRule | None:
    """Selection of one row, `b v s -> b s`: only one shard has the row, so that with a sharded
    dimension `v` the output is a partial sum."""
    dim = argument(op, "dim") % len(op.inputs[0].shape)
    dims = factor_names(op.inputs[0])
    row = dims[dim]
    # Booleans have no sum.
    if row is None or op.output.dtype == torch.bool:
        return unbind(op)
    kernel = partial(_build_select_kernel, row, dim)
    return sharding_rule(op, (dims,), (_remove_dim(dims, dim),), reduced=row, kernel=kernel)


def _build_select_kernel(row: str, dim: int, op: Op, local: LocalSharding) -> Callable[..., Tensor]:
    shards, size = local.shard_counts.get(row, 1), op.inputs[0].shape[dim]
    if shards == 1:
        return op.target
    index = argument(op, "index") % size
    number = index // (size // shards)
    block: Any = local.index(row)
    # The same row of each shard, which the other shards mask.
    select_local_row = WithArguments(op, index=index % (size // shards))

    def run(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = select_local_row(*args, **kwargs)
        # Compared as tensors, because a simulated rank has an index of its own in each `SymInt`.
        return out.masked_fill(torch.full((), number, device=out.device).ne(block), 0)

    return run


@rule_for(aten.unbind.int)
def unbind(op: Op) -> ShardingRule:
    """Unbinding, `b _ s -> b s, b s`: all but the removed dimension can be sharded."""
    x = op.inputs[0]
    dim = argument(op, "dim") % len(x.shape)
    dims = unsharded_at(factor_names(x), dim)
    return sharding_rule(op, (dims,), (_remove_dim(dims, dim),) * len(op.outputs))


@rule_for(aten.slice.Tensor)
def slice_rule(op: Op) -> ShardingRule:
    """Slice, `b s -> b s`: the sliced dimension can be sharded if the slice is the full dimension,
    every n-th row, or consecutive rows whose number and first index the shard count divides."""
    x, dim, step = op.inputs[0], argument(op, "dim"), argument(op, "step")
    # `x[:, :]` is exported as slices over full dimensions; these must not keep a dimension
    # replicated.
    is_full = op.output.shape == x.shape and step == 1
    dims, size = factor_names(x), x.shape[dim] if x.shape else 0
    # Resolves a start that is None, negative or beyond the end.
    start = slice(argument(op, "start"), None, step).indices(size)[0]
    if step > 1 and op.output.shape[dim] * step == size:
        # Every shard begins at a multiple of `step`.
        every_step = WithArguments(op, start=start, end=size)
        capacity = {str(dims[dim]): op.output.shape[dim]}
        return sharding_rule(
            op, (dims,), (dims,), capacity=capacity, kernel=lambda op, local: every_step
        )
    if step == 1 and not is_full:
        return slice_of_consecutive_rows(op, dim % len(x.shape), start)
    dims = dims if is_full else unsharded_at(dims, dim)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("select_scatter", "slice_scatter"))
def slice_scatter_rule(op: Op) -> ShardingRule:
    """Write of a slice, `b _, b _ -> b _` (`slice_scatter`) or `b _, b -> b _` (`select_scatter`):
    the dimension in which the source is written cannot be sharded."""
    x, source = op.inputs
    dim = argument(op, "dim") % len(x.shape)
    dims = unsharded_at(factor_names(x), dim)
    written = dims if len(source.shape) == len(x.shape) else _remove_dim(dims, dim)
    return sharding_rule(op, (dims, written), (dims,))


@rule_for(*overloads("one_hot"))
def one_hot(op: Op) -> ShardingRule | None:
    """One-hot encoding, `b s -> b s v`; returns None if the number of classes is inferred from the
    data, as the data of shards differ."""
    if argument(op, "num_classes") < 0:
        return None
    dims = factor_names(op.output, exclude="v")
    return sharding_rule(op, (dims[:-1],), ((*dims[:-1], "v"),), kernel=one_hot_kernel("v"))


@rule_for(*overloads("gather", "take_along_dim"))
def gather(op: Op) -> ShardingRule | None:
    """Gather, `b v, b s -> b s`: with a sharded indexed dimension `v`, the output is a partial sum.

    Returns None without `dim`, as the operator then flattens the tensors.
    """
    x, indices = op.inputs
    dim = argument(op, "dim")
    if dim is None or len(x.shape) != len(indices.shape) or not x.shape:
        return None
    indexed_dim = dim % len(x.shape)
    # Where the index is smaller than `x`, only the first elements of `x` are read: shards of `x`
    # and of the index would not be aligned.
    unequal = [
        i
        for i, sizes in enumerate(zip(x.shape, indices.shape, strict=True))
        if _has_unequal_sizes(sizes)
    ]
    dims = unsharded_at(factor_names(x, exclude="v"), *(i for i in unequal if i != indexed_dim))
    source = (*dims[:indexed_dim], "v", *dims[indexed_dim + 1 :])
    # `gather` calls its indices `index`, `take_along_dim` calls them `indices`.
    name = "index" if "index" in call_arguments(op) else "indices"
    return _build_indexed_read_rule(op, (source, dims), dims, IndexedDims(name, {indexed_dim: "v"}))


@rule_for(*overloads("scatter", "scatter_add", "scatter_reduce"))
def scatter(op: Op) -> ShardingRule:
    """Scatter, `b v, b _, b _ -> b v`: the indexed dimension `v` can be sharded, and other
    dimensions in which all tensors have the same size.

    With addition, a maximum, a minimum or a product the rows can be sharded too, `b v, b e, b e ->
    b v`: a sum is then a partial sum.
    """
    x, *others = op.inputs
    shapes = [x.shape, *(value.shape for value in others if value.shape)]
    unequal = [i for i, sizes in enumerate(zip(*shapes, strict=False)) if _has_unequal_sizes(sizes)]
    if not x.shape:
        return sharding_rule(op, ((),) * len(op.inputs), ((),))
    dim = argument(op, "dim") % len(x.shape)
    dims = unsharded_at(factor_names(x, exclude="ve"), dim, *unequal)
    written = (*dims[:dim], "v", *dims[dim + 1 :])
    # Only the first elements of a source longer than its index are added.
    lengths = {value.shape[dim] for value in others if value.shape}
    is_sum, is_reduced = _is_additive_write(op), _is_reducing_write(op)
    added = ("e",) if (is_sum or is_reduced) and len(lengths) == 1 else ()
    # Rows that overwrite are replicated, since any of them may go to any shard.
    rows = (*dims[:dim], *(added or (None,)), *dims[dim + 1 :])
    inputs = [rows if len(value.shape) == len(dims) else () for value in others]
    reduction = ScatteredRows(argument(op, "reduce"), "e", "v") if is_reduced else None
    return sharding_rule(
        op,
        (written, *inputs),
        (written,),
        reduced=added if is_sum else (),
        complete=frozenset(() if is_sum else added),
        kernel=IndexedDims("index", {dim: "v"}, added=added).write_kernel(reduction),
        reductions=lambda op, counts: (
            reduction.reductions(op, written, counts) if reduction else ()
        ),
    )


@rule_for(*overloads("take"))
def take(op: Op) -> ShardingRule:
    """Lookup in a flattened tensor, `_ _, b -> b`: the indices can be sharded; the flattened tensor
    that they index cannot."""
    dims = factor_names(op.inputs[1])
    return sharding_rule(op, ((None,) * len(op.inputs[0].shape), dims), (dims,))


@rule_for(*overloads("index_select"))
def index_select(op: Op) -> ShardingRule:
    """Selection by index, `b v, s -> b s`: with a sharded indexed dimension `v`, the output is a
    partial sum."""
    x, indices = op.inputs
    dims = factor_names(x, exclude="v")
    if not dims:
        return sharding_rule(op, ((), (None,) * len(indices.shape)), ((),))
    dim = argument(op, "dim") % len(dims)
    # The output has the indices in place of the indexed dimension, under the name of that
    # dimension; the input calls it `v`.
    index_dims = (dims[dim],)[: len(indices.shape)]
    # A scalar index leaves one row, which cannot be sharded.
    out = dims if index_dims else unsharded_at(dims, dim)
    source = (*dims[:dim], "v", *dims[dim + 1 :])
    indexed = IndexedDims("index", {dim: "v"}, trailing=len(dims) - 1 - dim)
    return _build_indexed_read_rule(op, (source, index_dims), out, indexed)


@rule_for(*overloads("index_add", "index_copy", "index_fill"))
def index_add_rule(op: Op) -> ShardingRule | None:
    """Update by index, `b v, _, b _ -> b v`: each device writes to its shard of the indexed
    dimension `v`. Added rows can be sharded too, `b v, e, b e -> b v`: the output is a partial
    sum."""
    x, indices, *source = op.inputs
    if not x.shape:
        return None
    dim = argument(op, "dim") % len(x.shape)
    dims = factor_names(x, exclude="ve")
    written = (*dims[:dim], "v", *dims[dim + 1 :])
    added = ("e",) if _is_additive_write(op) and indices.shape else ()
    row = added or (None,)
    rows = (*dims[:dim], *row, *dims[dim + 1 :])
    sources = [rows if len(value.shape) == len(dims) else () for value in source]
    return sharding_rule(
        op,
        (written, row * len(indices.shape), *sources),
        (written,),
        reduced=added,
        kernel=IndexedDims("index", {dim: "v"}, added=added).write_kernel(),
    )


@rule_for(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(op: Op) -> ShardingRule | None:
    """Indexing by tensors, `b s, t -> t s`: with sharded indexed dimensions, the output is a
    partial sum.

    Returns None for masks, as the shape of the result depends on the data.
    """
    dims = _assign_tensor_indexing_factors(op)
    if dims is None:
        return None
    _, at, result = dims
    indices = [at[len(at) - len(value.shape) :] for value in op.inputs[1:]]
    # The dimensions of the result behind those of the indices, which may stand in its middle.
    trailing = len(result) - len(at) - (result.index(at[0]) if at else 0)
    indexed = IndexedDims("indices", _find_indexed_factors(op), is_list=True, trailing=trailing)
    return _build_indexed_read_rule(op, (factor_names(op.inputs[0]), *indices), result, indexed)


@rule_for(aten.index_put.default)
def index_put(op: Op) -> ShardingRule | None:
    """Assignment by index tensors, `b s, _, _ s -> b s`; returns None for masks.

    Each device writes to its shard of the first indexed dimension; other indexed dimensions cannot
    be sharded. With `accumulate` the rows can be sharded too: the output is a partial sum.
    """
    dims = _assign_tensor_indexing_factors(op)
    if dims is None:
        return None
    source, at, result = dims
    *indices, values = op.inputs[1:]
    # With sharded indices each device writes only some of the rows of its copy.
    added = tuple(name for name in at if name is not None) if _is_additive_write(op) else ()
    written = tuple(None if name in at and name not in added else name for name in result)
    index_dims = [
        at[len(at) - len(value.shape) :] if added else (None,) * len(value.shape)
        for value in indices
    ]
    # The kernel of writes appends a row to one sharded dimension only.
    first = dict([next(iter(_find_indexed_factors(op).items()))])
    source = tuple(first.get(dim, name) for dim, name in enumerate(source))
    return sharding_rule(
        op,
        (source, *index_dims, written[len(written) - len(values.shape) :]),
        (source,),
        reduced=added,
        kernel=IndexedDims("indices", first, is_list=True, added=added).write_kernel(),
    )


def _is_additive_write(op: Op) -> bool:
    """Whether a write, such as `scatter_add`, adds rows to its first input, so that rows can be
    sharded."""
    # Booleans have no sum.
    if op.output.dtype == torch.bool:
        return False
    if op.target in _ADDING_WRITES:
        return True
    if op.target is aten.index_put.default:
        return bool(argument(op, "accumulate"))
    # With `include_self=False`, an element is dropped where anything is added.
    includes_self = argument(op, "include_self", True)
    return argument(op, "reduce") in ("sum", "add") and bool(includes_self)


def _is_reducing_write(op: Op) -> bool:
    """Whether a write, `scatter_reduce`, takes the extreme or the product of rows."""
    # `decompose` has replaced calls whose result does not include the first input.
    reduces = argument(op, "reduce") in (*EXTREMES, "prod") and argument(op, "include_self", False)
    return bool(reduces) and op.output.dtype != torch.bool and not op.output.dtype.is_complex


def _build_indexed_read_rule(
    op: Op, inputs: Sequence[Dims], output: Dims, indexed: IndexedDims
) -> ShardingRule:
    """Return the rule of an operator that reads elements at indices; with sharded indexed
    dimensions the output is a partial sum."""
    # Booleans have no sum.
    if op.output.dtype == torch.bool:
        (source, *others) = inputs
        inputs = (unsharded_at(source, *indexed.factors), *others)
        return sharding_rule(op, inputs, (output,))
    return sharding_rule(
        op, inputs, (output,), reduced=indexed.factors.values(), kernel=indexed.read_kernel()
    )


def _find_indexed_factors(op: Op) -> dict[int, str]:
    """Return the factor of each indexed dimension of `x[indices]`."""
    dims = factor_names(op.inputs[0])
    return {dim: str(dims[dim]) for dim, index in enumerate(op.args[1]) if index is not None}


def _assign_tensor_indexing_factors(op: Op) -> tuple[Dims, Dims, Dims] | None:
    """Return the factors of `x`, of the broadcast indices and of the output of `x[indices]`.

    As in NumPy, the dimensions of the indices replace the indexed dimensions, or come first if the
    indexed dimensions are not adjacent. Returns None if an index is a mask, or there is no index.
    """
    x, indices = op.args[0], list(op.args[1])
    indexed = [i for i, index in enumerate(indices) if index is not None]
    index_values = [value for value in indices if isinstance(value, Value)]
    # PyTorch reads uint8 indices as masks too.
    if not indexed or any(value.dtype in (torch.bool, torch.uint8) for value in index_values):
        return None
    source = unsharded_at(factor_names(x), *indexed)
    # The dimensions of the indices are factors of their own.
    unused = [name for name in NAMES if name not in factor_names(x)]
    at: Dims = tuple(unused[: max(len(value.shape) for value in index_values)])
    first, last = indexed[0], indexed[-1]
    if indexed == list(range(first, last + 1)):
        return source, at, (*source[:first], *at, *source[last + 1 :])
    remaining = tuple(name for i, name in enumerate(source) if i not in indexed)
    return source, at, (*at, *remaining)


def _has_unequal_sizes(sizes: tuple[int, ...]) -> bool:
    return len(set(sizes)) > 1


def _remove_dim(dims: Dims, dim: int) -> Dims:
    return (*dims[:dim], *dims[dim + 1 :])

"""Reject pairing an output of the global batch with tensors of a rank's local batch.

With `dataset_strategy`, each rank passes a local batch but gets outputs of the global batch. The
labels of a local batch, combined with an output, would broadcast (a local batch of one sample) or
be paired with samples of other ranks (`gather`). So outputs, and tensors computed from outputs, are
`WholeBatchTensor`s, which record their batch dimensions and check each function call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import resolve_name

from shardwright.core.misuse.caller import user_line
from shardwright.core.misuse.paired_batch import (
    BatchCall,
    BatchDims,
    BatchSizes,
    batch_dims_of_new_tensors,
    dim_of_size,
)
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.compiled import run_uncompiled_with
from shardwright.core.torch_internals.dispatch import without_torch_function_of_subclasses
from shardwright.core.torch_internals.tensors import base_getter, grad_getter
from shardwright.errors import DataError

TENSOR_GETTERS = (base_getter, grad_getter)
"""Getters of tensor attributes, which return existing tensors."""

REMEDY = (
    "put the loss into the model (`sw.WithLoss`, or return it from `forward`), and pass the local"
    " labels to the model on each rank; or gather the labels of all ranks"
    " (`torch.distributed.all_gather`); if the tensor is one row for all samples, pass the row"
    " (`c[0]`) or expand the tensor (`c.expand(len(output), -1)`)"
)


@dataclass(frozen=True)
class OutputBatch:
    """The global batch of an output, if ranks pass local batches.

    Args:
        output: name of the output for errors.
        sizes: sizes of the local and of the global batch.
        watch: function that registers the check that all ranks train the output with the same loss;
            called with the tensor and `output`.
    """

    output: str
    sizes: BatchSizes
    watch: Callable[[Tensor, str], None]

    def label(self, output: Tensor, dims: BatchDims | None = None) -> Tensor:
        """Convert an output to a tensor that rejects pairing with a local batch.

        Args:
            output: a full output of the global batch; scalars stay ordinary tensors.
            dims: batch dimensions of `output`; by default `dims_in(output.shape)`.
        """
        if type(output) is not Tensor:
            output = output.clone()  # a `GatheredCopy`, which is read-only
        run_uncompiled_with(WholeBatchTensor)
        self.watch(output, self.output)
        if dims is None:
            dims = self.dims_in(output.shape)
        return WholeBatchTensor.of(output, self, dims) if output.ndim else output

    def dims_in(self, shape: Sequence[int]) -> BatchDims:
        """Return the assumed batch dimension of an output of this shape; empty if no dimension can
        be the batch."""
        return dim_of_size(shape, self.sizes.total)


def output_batches(
    model: str,
    structure: pytree.TreeSpec,
    sizes: BatchSizes | None,
    watch: Callable[[Tensor, str], None],
) -> list[OutputBatch | None]:
    """Return the global batch of each output of a call; a list of None if ranks pass the global
    batch.

    Args:
        model: name of the model for errors.
        structure: the structure of the outputs.
        sizes: sizes of the local and of the global batch; None if ranks pass the global batch.
        watch: function that registers the check of an output's gradients (`OutputBatch.watch`).
    """
    count = structure.num_leaves
    if sizes is None:
        return [None] * count
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(count), structure))
    names = (pytree.keystr(path) for path, _ in paths)
    return [
        OutputBatch(f"output {name} of {model}" if name else f"the output of {model}", sizes, watch)
        for name in names
    ]


def batch_sizes(leaves: Sequence[Any], global_leaves: Sequence[Any]) -> BatchSizes | None:
    """Return the batch sizes of a call; None if this rank passes the global batch, or an
    empty one.

    Args:
        leaves: leaves of the arguments that this rank passes.
        global_leaves: the same leaves with the shapes of the global batch.
    """
    for leaf, global_leaf in zip(leaves, global_leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] != global_leaf.shape[0]:
            return BatchSizes(leaf.shape[0], global_leaf.shape[0]) if leaf.shape[0] else None
    return None


def to_plain_tensors(
    planned: Sequence[Any], arrivals: Collection[str], leaves: Sequence[Any]
) -> list[Any]:
    """Convert the tensors among the leaves of a call to ordinary tensors.

    Args:
        planned: for each leaf, the planned input: a value of the graph, a constant, or None.
        arrivals: names of the inputs that ranks pass sharded.
        leaves: leaves of the arguments of the call.

    Raises:
        DataError: if an output of the global batch is passed as a local batch.
    """
    for value, leaf in zip(planned, leaves, strict=True):
        name = getattr(value, "name", None)
        if name in arrivals and isinstance(leaf, WholeBatchTensor) and 0 in leaf.batch_dims:
            assert leaf.batch is not None
            raise DataError(
                f"input {name!r}{user_line()} is {leaf.batch.output}, which has the samples of the"
                " global batch, but with this `dataset_strategy` each rank passes a local batch\n"
                "combine both models in one module and plan that, or plan with"
                " `dataset_strategy='full_batch'`"
            )
    return [to_plain_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


class WholeBatchTensor(Tensor):
    """An output of the global batch, or a tensor computed from one."""

    batch: OutputBatch | None = None
    batch_dims: BatchDims = frozenset()

    @classmethod
    def of(cls, tensor: Tensor, batch: OutputBatch, dims: BatchDims) -> WholeBatchTensor:
        """Return `tensor` as a `WholeBatchTensor` that shares its memory and autograd graph.

        Args:
            tensor: an output, or a tensor computed from one.
            batch: the global batch of the output.
            dims: batch dimensions of `tensor`.
        """
        with without_torch_function_of_subclasses():
            result: WholeBatchTensor = tensor.as_subclass(cls)
        result.batch, result.batch_dims = batch, dims
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # a sharded output (a DTensor) handles the call
        leaves = pytree.tree_leaves((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = _batch_call(func, args, kwargs, arguments)
        if call is not None:
            _refuse_shards(call, arguments)
        with without_torch_function_of_subclasses():
            results = func(*args, **kwargs)
        if func in TENSOR_GETTERS:
            return results
        batch = next((t.batch for t in arguments if isinstance(t, cls) and t.batch), None)
        return results if batch is None else _mark_results(results, batch, call, arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(to_plain_tensor(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return to_plain_tensor(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def to_plain_tensor(tensor: Tensor) -> Tensor:
    """Return a `WholeBatchTensor` as an ordinary tensor that shares its memory; return other
    tensors unchanged."""
    if not isinstance(tensor, WholeBatchTensor):
        return tensor
    with without_torch_function_of_subclasses():
        return tensor.as_subclass(Tensor)


def _batch_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Sequence[Tensor]
) -> BatchCall | None:
    """Return the call of `func` as a `BatchCall`; None if no argument has a batch dimension."""
    derived = [tensor for tensor in arguments if isinstance(tensor, WholeBatchTensor)]
    with_rows = [tensor for tensor in derived if tensor.batch_dims]
    if not with_rows or with_rows[0].batch is None:
        return None
    others = {
        id(tensor): tensor
        for tensor in arguments
        if not isinstance(tensor, WholeBatchTensor | DTensor)
    }
    return BatchCall(
        func,
        args,
        kwargs,
        with_rows[0].batch.sizes,
        {id(tensor): tensor.batch_dims for tensor in with_rows},
        tuple(others.values()),
    )


def _refuse_shards(call: BatchCall, arguments: Sequence[Tensor]) -> None:
    """Check that a call does not pair samples of the global batch with samples of a local batch.

    Raises:
        DataError: if the call pairs samples of the two batches.
    """
    with without_torch_function_of_subclasses():
        shards = call.paired_shards() or _shards_used_as_indices(call)
    if shards:
        output = next(tensor for tensor in arguments if id(tensor) in call.batch_dims)
        assert isinstance(output, WholeBatchTensor) and output.batch is not None
        _raise_pairing_error(call, output.batch, output, shards)


def _shards_used_as_indices(call: BatchCall) -> tuple[Tensor, ...]:
    """Return the indices in `output[torch.arange(len(labels)), labels]` if `labels` has the size of
    the local batch; empty for other calls.

    Indexing accepts indices of any size, so `paired_shards` does not detect this call, but every
    rank would read the samples of the first rank.
    """
    if call.function is not Tensor.__getitem__ or not isinstance(call.args[1], tuple):
        return ()
    output, indices = call.args
    shards = tuple(
        index
        for index in indices
        if isinstance(index, Tensor) and index.ndim and index.shape[0] == call.sizes.local
    )
    is_row_index = any(indices[0] is shard for shard in shards)
    reads_rows = 0 in call.batch_dims.get(id(output), ()) and is_row_index
    return shards if reads_rows and len(shards) > 1 else ()


def _raise_pairing_error(
    call: BatchCall, batch: OutputBatch, output: Tensor, shards: Sequence[Tensor]
) -> NoReturn:
    shapes = " and ".join(str(list(shard.shape)) for shard in shards)
    sizes = batch.sizes
    raise DataError(
        f"`{resolve_name(call.function) or call.function}`{user_line()} combines {batch.output},"
        f" of shape {list(output.shape)}, with a tensor of shape {shapes}, but with this"
        f" `dataset_strategy` this rank passed {sizes.local} of {sizes.total} samples, and"
        f" outputs have all samples\n{REMEDY}"
    )


def _mark_results(
    results: Any, batch: OutputBatch, call: BatchCall | None, arguments: Sequence[Tensor]
) -> Any:
    """Convert new tensors computed from an output of `batch` to `WholeBatchTensor`s.

    Scalars stay ordinary tensors.

    Args:
        results: return value of the function.
        batch: the global batch of an argument.
        call: the call with its batch dimensions; None if no argument has a batch dimension.
        arguments: the tensors that the function was called with.
    """
    leaves, spec = pytree.tree_flatten(results)
    dims = batch_dims_of_new_tensors(Tensor, leaves, arguments, call)
    if not dims:
        return results
    marked = [
        WholeBatchTensor.of(leaf, batch, dims[index]) if index in dims and leaf.ndim else leaf
        for index, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(marked, spec)

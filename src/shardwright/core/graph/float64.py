"""Convert a graph and a module to float64, so that rounding does not hide differences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.overrides import TorchFunctionMode

from shardwright.core.deferred import copies_of_attributes
from shardwright.core.graph.graph import Graph, Op, Value, WholeBatch
from shardwright.core.graph.segment_matmul import segment_matmul
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import TorchDispatchMode
from shardwright.core.torch_internals.modules import memo_of_process_groups

GROUPED_MM = torch.ops.aten._grouped_mm.default
SEGMENT_MATMUL = torch.ops.shardwright.segment_matmul.default

_REGISTRIES = frozenset(vars(nn.Module()))
"""Names of the attributes that every `nn.Module` has, such as `_parameters`."""


def graph_in_float64(graph: Graph, twin: Graph | None = None) -> Graph:
    """Convert the floating-point values, constants and dtype arguments of a graph to float64.

    Complex dtypes become complex128. Explicit casts of the model (`x.to(torch.float32)` in a norm)
    become casts to float64.

    Args:
        graph: the graph to convert.
        twin: a graph captured from the module in float64. If both graphs have equal operators,
            floats and constants are taken from `twin`, since they may depend on the dtype
            (`torch.finfo(x.dtype).eps`).
    """
    new = {
        # Neither storage nor arguments keep a dtype of their own: nothing may round.
        value: replace(value, dtype=double_dtype(value.dtype), outer_dtype=None)
        for value in graph.values()
    }
    twin_of = {} if twin is None else paired_operators(graph, twin)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return new[leaf]
        return double_dtype(leaf) if isinstance(leaf, torch.dtype) else leaf

    def convert_op(op: Op) -> Op:
        if is_product_of_row_groups(op):
            return replace(
                op,
                target=SEGMENT_MATMUL,
                # True: `torch._grouped_mm` accepts rows behind the last group.
                args=(*(new[value] for value in op.inputs), True),
                kwargs={},
                outputs=(new[op.output],),
            )
        args, kwargs = pytree.tree_map(convert, _copy_floats_from_twin(op, twin_of.get(op, op)))
        # The target of a `local_map` contains the dtypes of its results.
        target = _convert_target_to_float64(op)
        outputs = tuple(new[v] for v in op.outputs)
        return replace(op, target=target, args=args, kwargs=kwargs, outputs=outputs)

    constants = list(graph.constants.values())
    # If the operators do not pair up, the constants may have another order.
    if twin is not None and twin_of and len(twin.constants) == len(constants):
        constants = list(twin.constants.values())
    return replace(
        graph,
        ops=tuple(convert_op(op) for op in graph.ops),
        inputs=tuple(convert(leaf) for leaf in graph.inputs),
        outputs=tuple(convert(leaf) for leaf in graph.outputs),
        parameters=tuple(new[v] for v in graph.parameters),
        buffers=tuple(new[v] for v in graph.buffers),
        constants={
            new[v]: in_float64(tensor) for v, tensor in zip(graph.constants, constants, strict=True)
        },
        updates=tuple((new[a], new[b]) for a, b in graph.updates),
        loss=None if graph.loss is None else new[graph.loss],
        other_losses=tuple(new[v] for v in graph.other_losses),
        whole_batch=_convert_whole_batch_to_float64(
            graph.whole_batch, twin.whole_batch if twin else None
        ),
    )


def _convert_whole_batch_to_float64(
    whole_batch: WholeBatch | str | None, twin: WholeBatch | str | None
) -> WholeBatch | str | None:
    if not isinstance(whole_batch, WholeBatch) or whole_batch.prologue is None:
        return whole_batch
    prologue = twin.prologue if isinstance(twin, WholeBatch) else None
    return replace(whole_batch, prologue=graph_in_float64(whole_batch.prologue, prologue))


def paired_operators(graph: Graph, twin: Graph) -> dict[Op, Op]:
    """Map each operator of `graph` to the same operator of `twin`, a graph captured in float64.

    Returns an empty map if the graphs have different operators. Casts between floating-point dtypes
    are omitted, as a graph in float64 has fewer.
    """
    ops, twin_ops = ([op for op in g.ops if not _is_cast_between_floats(op)] for g in (graph, twin))
    # A model may branch on dtypes, and then have other operators in float64.
    if [_get_comparable_target(op) for op in ops] != [
        _get_comparable_target(op) for op in twin_ops
    ]:
        return {}
    return dict(zip(ops, twin_ops, strict=True))


def is_product_of_row_groups(op: Op) -> bool:
    """Whether an operator is `torch._grouped_mm` of `[rows, k]` and `[groups, k, j]`, which has no
    float64 kernel."""
    ranks = [len(value.shape) for value in op.inputs]
    # Rows, matrices, and the end of each group.
    return op.target == GROUPED_MM and ranks == [2, 3, 1]


def _get_comparable_target(op: Op) -> object:
    return SEGMENT_MATMUL if is_product_of_row_groups(op) else _convert_target_to_float64(op)


def _convert_target_to_float64(op: Op) -> Any:
    """Return the target of an operator; for a `LocalCall`, which has dtypes, its float64 copy."""
    as_float64: Any = getattr(op.target, "as_float64", None)
    return op.target if as_float64 is None else as_float64()


def _is_cast_between_floats(op: Op) -> bool:
    """Whether the operator converts one floating-point dtype to another."""
    # The second input of `type_as` only supplies the dtype.
    values = (*op.inputs[:1], *op.outputs)
    converts = str(op.target).startswith(("aten.to.", "aten._to_copy.", "aten.type_as."))
    return converts and all(value.dtype.is_floating_point for value in values)


def _copy_floats_from_twin(op: Op, twin: Op) -> tuple[Any, Any]:
    """Return the `args` and `kwargs` of `op`, with floats replaced by the floats of `twin`.

    Arguments are returned unchanged if `op` and `twin` have different numbers of arguments.

    Args:
        op: an operator.
        twin: the same operator captured in float64.
    """
    leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
    twin_leaves = pytree.tree_leaves((twin.args, twin.kwargs))
    if len(leaves) == len(twin_leaves):
        pairs = zip(leaves, twin_leaves, strict=True)
        # Only floats: integers and flags do not depend on a dtype.
        leaves = [b if isinstance(a, float) and isinstance(b, float) else a for a, b in pairs]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def module_in_float64(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy a module to float64, including tensors that are plain attributes.

    Args:
        module: the module to copy; its parameters may be on the meta device.
        values: the values of parameters and buffers, by name.
    """
    # `deepcopy` first looks an object up in `memo`, so each tensor is replaced by its float64 copy.
    memo: dict[int, Any] = {**memo_of_process_groups(module)}
    for name, parameter in module.named_parameters():
        double = in_float64(values[name])
        memo[id(parameter)] = nn.Parameter(double, requires_grad=parameter.requires_grad)
    memo.update((id(buffer), in_float64(values[name])) for name, buffer in module.named_buffers())
    memo.update((key, in_float64(t)) for key, t in copies_of_attributes(module).items())
    memo.update((id(t), in_float64(t)) for t in _iterate_tensors_of_distributions(module))
    double_module = copy.deepcopy(module, memo)
    for child in double_module.modules():
        config: Any = getattr(child, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            # The default of `transformers` calls `torch._grouped_mm`, which has no float64 kernel.
            config._experts_implementation = "eager"
    return double_module


def _iterate_tensors_of_distributions(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of `torch.distributions` objects in module attributes, such as a prior's
    mean."""
    waiting = [
        leaf
        for child in module.modules()
        for leaf in pytree.tree_leaves(_list_plain_attributes(child))
    ]
    while waiting:
        leaf = waiting.pop()
        if isinstance(leaf, (Distribution, Transform)):
            attributes = pytree.tree_leaves(list(vars(leaf).values()))
            yield from (each for each in attributes if isinstance(each, Tensor))
            # A transformed distribution has a base distribution and transforms.
            waiting += attributes


def _list_plain_attributes(module: nn.Module) -> list[Any]:
    # Not the registries of `nn.Module`: submodules are visited by themselves.
    return [value for name, value in vars(module).items() if name not in _REGISTRIES]


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Set the default dtype to float64 within a context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class EverythingInFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which casts to floating-point dtypes become casts to float64.

    Tensors that `torch.tensor` makes from numbers are converted too (`lift_fresh`).
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _double_dtypes((args, kwargs or {}))
        result = func(*args, **kwargs)
        if func == torch.ops.aten.lift_fresh.default:
            return result.to(double_dtype(result.dtype))
        return result


def _double_dtypes(arguments: Any) -> Any:
    """Return nested `arguments` with each dtype converted by `double_dtype`."""
    # `x.new(size)` has the shape `size` for a `torch.Size` alone, which a map would make a tuple.
    return pytree.tree_map_only(
        torch.dtype, double_dtype, arguments, is_leaf=lambda each: isinstance(each, torch.Size)
    )


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Context in which all new floating-point tensors of eager code are float64."""
    with float64_by_default(), EverythingInFloat64():  # type: ignore[no-untyped-call]
        yield


class CastsToFloat64(TorchFunctionMode):
    """Function mode in which casts (`x.float()`) and dtype arguments (`x.to(torch.float32)`,
    `torch.zeros(3, dtype=torch.float32)`) become float64, and `torch._grouped_mm` computes in
    float64.

    Tracing needs this mode in addition to `EverythingInFloat64`, because it records the operators
    of a model before they reach a dispatch mode.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            dtype = double_dtype(_CASTS[func])
            return args[0].to(dtype, *args[1:], **(kwargs or {}))
        if getattr(func, "__name__", "") == "_grouped_mm":
            return grouped_product(*args, **(kwargs or {}))
        args, kwargs = _double_dtypes((args, kwargs or {}))
        return func(*args, **kwargs)


def grouped_product(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch._grouped_mm`; unlike PyTorch's, groups of rows may be float64."""
    # Other forms are left to PyTorch's operator, which has no float64 kernel.
    if offs is None or bias is not None or (mat_a.ndim, mat_b.ndim) != (2, 3):
        product: Tensor = GROUPED_MM(mat_a, mat_b, offs, bias, out_dtype)
    else:
        # True: `torch._grouped_mm` accepts rows behind the last group.
        product = segment_matmul(mat_a, mat_b, offs, True)
    return product


_CASTS = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.cfloat: torch.complex64,  # type: ignore[attr-defined]
}


def in_float64(tensor: Tensor) -> Tensor:
    """Copy and detach a tensor, with its dtype converted by `double_dtype`."""
    # `to` returns the tensor itself if it has the dtype already, hence the clone.
    return tensor.detach().clone().to(double_dtype(tensor.dtype))


def double_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for a floating-point dtype, complex128 for a complex dtype, else `dtype`."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype

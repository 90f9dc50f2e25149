"""Run operators that DTensor does not support, or reject them if results would be wrong.

Users' optimizers combine parameters with ordinary tensors, and call operators for which DTensor has
no sharding strategy. If autograd does not record a call, ordinary tensors count as replicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwright.core.misuse.caller import is_called_by, optimizer_among_callers
from shardwright.core.misuse.ranks import is_due
from shardwright.core.runtime.adopt_optimizer import is_planned_parameter
from shardwright.core.runtime.full_tensors import (
    can_compute_on_full_tensors,
    compute_on_full_tensors,
    compute_on_shards,
)
from shardwright.core.runtime.replicated_tensors import differs_between_ranks
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dtensor import (
    assign_dtensor,
    before_fully_shard,
    local_tensor,
    share_local_memory,
    spec_of,
)
from shardwright.core.torch_internals.dtensor_dispatch import (
    compute_on_local_tensors,
    format_values,
    handle_assigned_data,
    handle_collectives,
    handle_mixed_tensors,
    handle_unsupported_operators,
    have_same_layout,
    refuse_methods,
    run_unless_mixed,
    set_operator_handler,
)
from shardwright.core.torch_internals.local_tensors import tensors_by_rank
from shardwright.core.torch_internals.operators import (
    OpOverload,
    operator_name,
    operators_in_namespace,
    schema_of,
    written_arguments,
)
from shardwright.core.torch_internals.tensors import FakeTensor
from shardwright.errors import MixedTensorsError, PlanError

aten = torch.ops.aten

OPTIMIZER_STEP_METHODS = frozenset(
    {"add_", "addcdiv_", "addcmul_", "lerp_", "mul_", "__iadd__", "__imul__", "__truediv__", "sqrt"}
)
"""Elementwise methods that optimizers call for each parameter in each step. They run on local
tensors, as DTensor's dispatch is slow."""

CALLS_OF_PARTS = "shardwright.core.misuse.calls_of_parts"

OVERWRITING_OPERATORS = frozenset({"copy_", "_foreach_copy_", "fill_"})
"""In-place operators that overwrite a tensor without reading it."""

FIRST_MIXES, PERIOD = 2, 256
"""Calls that compare ordinary tensors between ranks: the first `FIRST_MIXES` with equal shapes, and
every `PERIOD`-th.

Operators combine these tensors with DTensors.
"""


def compute_unsupported_operators() -> None:
    """Make DTensor run further operators, and explain in errors why others cannot run.

    The change applies to all DTensors of this process.
    """
    set_operator_handler(aten.index_put_.default, _assign_indexed_elements)
    set_operator_handler(aten.equal.default, _compare_tensors)
    for operator in operators_in_namespace("aten"):
        if (view := _find_out_of_place_view(operator)) is not None:
            set_operator_handler(operator, partial(_apply_view_in_place, view))
    handle_mixed_tensors(_run_operator_on_mixed_tensors)
    handle_unsupported_operators(_run_unsupported_operator)
    handle_collectives(_refuse_collective_on_dtensors)
    before_fully_shard(_refuse_fully_shard)
    compute_on_local_tensors(OPTIMIZER_STEP_METHODS)
    format_values()
    handle_assigned_data(_assign_dtensor_data)
    refuse_methods(("numpy", "tolist"), _make_mixed_tensors_error)


def _assign_indexed_elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `tensor[indices] = value` on DTensors without gathering a mask in `indices`.

    PyTorch would gather the mask, whose shape then differs from that of the shards.
    """
    operator, leaves = aten.index_put_.default, _find_tensor_arguments(args, kwargs)
    # Integer indices are left to DTensor.
    if not any(index is not None and index.dtype == torch.bool for index in args[1]):
        return run_unless_mixed(operator, _run_operator_on_mixed_tensors, args, kwargs)
    if compute_on_shards(operator, args, kwargs):
        return args[0]
    mesh = next(leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor))
    _check_tensors_equal_on_ranks(operator, leaves, mesh)
    return compute_on_full_tensors(operator, args, kwargs)


def _compare_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `torch.equal` of DTensors, False for tensors of different shapes.

    PyTorch would shard the second tensor along the dimensions of the first, which it may not have.
    """
    first, second = _find_tensor_arguments(args, kwargs)
    if first.shape != second.shape:
        return False
    return run_unless_mixed(aten.equal.default, _run_operator_on_mixed_tensors, args, kwargs)


def _assign_dtensor_data(tensor: DTensor, value: Any) -> None:
    """Assign `tensor.data = value`, for optimizers and averages of parameters.

    Raises:
        PlanError: if `tensor` cannot share the memory of `value`.
    """
    if not isinstance(value, DTensor):
        given = f"an ordinary tensor of shape {tuple(value.shape)}"
    elif value.dtype != tensor.dtype or value.shape != tensor.shape:
        given = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    elif not have_same_layout(spec_of(value), spec_of(tensor)):
        given = f"a DTensor with placements {value.placements} in place of {tensor.placements}"
    elif type(local_tensor(value)) is not type(local_tensor(tensor)):
        given = "a gathered copy"
    else:
        share_local_memory(tensor, value)
        return
    raise PlanError(
        f"`.data` of a DTensor of shape {tuple(tensor.shape)} and {tensor.dtype}{_describe_step()}"
        f" is replaced by {given}, whose memory it cannot share\ncopy the values into it under"
        " `torch.no_grad()` (`p.copy_(value)`), which keeps each rank's shard; convert or resize a"
        " model (`to`, `half`, `resize_token_embeddings`) before `sw.plan`"
    )


def _run_unsupported_operator(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None
) -> Any:
    # A collective that an optimizer or hook calls reaches DTensor as an operator without a rule.
    if operator.namespace in ("c10d", "_c10d_functional"):
        _refuse_collective_on_dtensors(operator)
    # Fake, meta and simulated tensors get DTensor's own error, as they have no values to gather.
    if error is not None and not all(map(_is_real_tensor, _find_tensor_arguments(args, kwargs))):
        raise error
    # Shards first, as they need no communication.
    if compute_on_shards(operator, args, kwargs):
        # Operators on lists return nothing, others the tensor that they write to.
        return (
            _find_written_tensors(operator, args, kwargs)[0]
            if schema_of(operator).returns
            else None
        )
    if not can_compute_on_full_tensors(operator):
        raise PlanError(
            f"{operator}{_describe_step()} is not supported for DTensors, such as parameters of a"
            f" planned model: {str(error).partition(chr(10))[0]}\ncall it with the full"
            " tensor (`p.full_tensor()`); `p.copy_` of a full tensor keeps each rank's shard"
        ) from error
    return compute_on_full_tensors(operator, args, kwargs)


def _find_out_of_place_view(operator: OpOverload) -> Callable[..., Any] | None:
    """Return the view operator of an in-place view, such as `transpose` of `transpose_`, or
    None."""
    if torch.Tag.inplace_view not in operator.tags or operator is aten.detach_.default:
        # `detach_` works for DTensors.
        return None
    view = getattr(aten, operator_name(operator).removesuffix("_"))
    # The first overload stands for all: they differ in arguments only.
    returns = schema_of(getattr(view, view.overloads()[0])).returns
    # Only where the out-of-place operator returns a view.
    return view if returns[0].alias_info is not None else None


def _apply_view_in_place(
    view: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    """Apply an in-place view to a DTensor by its out-of-place operator.

    DTensor does not implement `x.transpose_(0, 1)`, and `x.squeeze_()` does not change `x.shape` if
    `x` is replicated.
    """
    tensor: DTensor = args[0]
    assign_dtensor(tensor, view(*args, **kwargs))
    return tensor


def _find_tensor_arguments(*arguments: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _find_written_tensors(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    positions = written_arguments(operator)
    return _find_tensor_arguments(
        [args[i] if i < len(args) else kwargs.get(name) for i, name in positions]
    )


def _find_read_tensors(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors among the arguments whose values an operator reads."""
    leaves = _find_tensor_arguments(args, kwargs)
    is_out_variant = any(argument.is_out for argument in schema_of(operator).arguments)
    if not is_out_variant and operator_name(operator) not in OVERWRITING_OPERATORS:
        return leaves
    written = {id(tensor) for tensor in _find_written_tensors(operator, args, kwargs)}
    return [leaf for leaf in leaves if id(leaf) not in written]


def _is_real_tensor(tensor: Tensor) -> bool:
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return not (
        local.is_meta or isinstance(local, FakeTensor) or tensors_by_rank(local) is not None
    )


def _run_operator_on_mixed_tensors(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None
) -> Any:
    """Run an operator on DTensors and ordinary tensors, which count as replicated.

    Raises:
        MixedTensorsError: if autograd records, as gradients of ordinary tensors would be DTensors.
        PlanError: if an ordinary tensor differs between ranks.
    """
    leaves = _find_tensor_arguments(args, kwargs)
    records = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    # Within a direct call of a submodule too, for which `calls_of_parts` names a remedy.
    if records or not all(map(_is_real_tensor, leaves)) or is_called_by(CALLS_OF_PARTS):
        raise _make_mixed_tensors_error(operator) from error
    mesh = next(leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor))
    _check_tensors_equal_on_ranks(operator, _find_read_tensors(operator, args, kwargs), mesh)
    # An ordinary target needs the full result.
    if not all(
        isinstance(tensor, DTensor) for tensor in _find_written_tensors(operator, args, kwargs)
    ):
        return compute_on_full_tensors(operator, args, kwargs)

    def replicated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            return leaf
        # `run_check` would broadcast the tensor of rank 0, which hides differences and costs a
        # collective.
        return DTensor.from_local(leaf, mesh, (Replicate(),) * mesh.ndim, run_check=False)

    dtensor_args, dtensor_kwargs = pytree.tree_map(replicated, (args, kwargs))
    return operator(*dtensor_args, **dtensor_kwargs)


@cache
def _get_mixed_call_counts() -> WeakKeyDictionary[object, Counter[tuple[Any, ...]]]:
    """Return the counters of calls that mix DTensors and ordinary tensors.

    They are keyed by the running optimizer or, outside of optimizer steps, by the device mesh. A
    counter maps (operator, shapes of ordinary tensors) to the number of calls.
    """
    return WeakKeyDictionary()


def _check_tensors_equal_on_ranks(
    operator: OpOverload, tensors: Sequence[Tensor], mesh: DeviceMesh
) -> None:
    """Check that ordinary tensors are equal on all ranks: in first calls and periodically later.

    Raises:
        PlanError: on all ranks, if a tensor differs between ranks.
    """
    # DTensor itself takes tensors of one element as replicated.
    ordinary = [x for x in tensors if not isinstance(x, DTensor) and x.numel() > 1]
    # Counted per optimizer, so that the first steps of each are compared.
    mixes = _get_mixed_call_counts().setdefault(optimizer_among_callers() or mesh, Counter())
    key = operator, *(tuple(tensor.shape) for tensor in ordinary)
    mixes[key] += 1
    if not is_due(mixes[key], FIRST_MIXES, PERIOD):
        return
    for tensor in ordinary:
        # Collective: the count is equal on all ranks, so all of them compare.
        if differs_between_ranks(tensor, mesh):
            raise PlanError(
                f"{operator}{_describe_step()}: an ordinary tensor of shape {tuple(tensor.shape)}"
                " is combined with parameters of a planned model, but differs between ranks, so the"
                " parameters would differ too\nmake the tensor equal on all ranks: call"
                " `torch.manual_seed(0)` on every rank before random draws, or draw with"
                " `torch.randn_like(p)`"
            )


def _make_mixed_tensors_error(operator: OpOverload | str) -> MixedTensorsError:
    return MixedTensorsError(
        f"{operator}{_describe_step()}: got mixed torch.Tensor and DTensor; the parameters of a"
        " planned model, their gradients and tensors computed from them are DTensors\nuse the full"
        " parameter (`p.full_tensor()`, which is differentiable), or shard the ordinary tensor"
        " like the parameter"
        " (`torch.distributed.tensor.distribute_tensor(tensor, p.device_mesh, p.placements)`);"
        " write `loss = loss + penalty` instead of `loss += penalty`; under `torch.no_grad()`"
        " they mix; inside `with sw.whole(net):` all tensors are ordinary"
    )


def _refuse_collective_on_dtensors(operator: OpOverload, *_: object) -> NoReturn:
    raise PlanError(
        f"{operator}{_describe_step()} was called on parameters or gradients that are DTensors, but"
        " a planned model reduces its gradients itself\nremove `DistributedDataParallel` and"
        " reductions of gradients (`mode='data_parallel'` plans them), and use the optimizer's"
        " variant for one device, which does not communicate; pass `p.full_tensor()` to other"
        " collectives"
    )


def _refuse_fully_shard(parameter: Tensor) -> None:
    # Not by the mesh: that of another library may equal the mesh of a plan.
    if is_planned_parameter(parameter):
        raise PlanError(
            "`fully_shard` or `replicate` was called on a planned model, whose parameter of shape"
            f" {tuple(parameter.shape)} is sharded already\nremove the call, since the plan reduces"
            " gradients; to shard parameters and optimizer state over replicas, plan with"
            " `sw.plan(net, batch, devices=8, hsdp={'level': 'level3'})`"
        )


def _describe_step() -> str:
    """Describe the running optimizer step for errors, as in ` in `Adam.step``; "" outside of
    steps."""
    optimizer = optimizer_among_callers()
    return f" in `{type(optimizer).__name__}.step`" if optimizer is not None else ""

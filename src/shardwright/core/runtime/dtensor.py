"""Shard parameters as DTensors with the storage layouts of a plan, and read their local shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.joined_axes import layout_on_joined_axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.parameter_hooks import has_hooks
from shardwright.core.torch_internals.dtensor import (
    StridedShard,
    local_part_of,
    local_tensor,
    spec_of,
    with_spec,
)
from shardwright.errors import LayoutError, PlanError


def local_shard(
    tensor: Tensor, layout: TensorLayout, devices: Devices, *, copy: bool = True
) -> DTensor:
    """Shard a full `tensor` without communication, and return this rank's shard as a DTensor.

    Args:
        tensor: the full tensor.
        layout: the layout of the result.
        devices: this rank's view of the devices.
        copy: False to share memory with `tensor` if the shard is the full tensor.
    """
    block = tensor.detach()[layout.slices(devices.rank, tuple(tensor.shape))]
    # A view of a part would keep the memory of the full tensor alive.
    local = block.to(devices.device, copy=copy or block.shape != tensor.shape)
    return as_dtensor(local.contiguous(), tensor, layout, devices)


def as_dtensor(local: Tensor, like: Tensor, layout: TensorLayout, devices: Devices) -> DTensor:
    """Return a DTensor with the global shape of `like` and local shard `local`, without
    communication.

    Raises:
        LayoutError: if `layout` shards separately by axes that `devices.mesh` flattens into one.
    """
    assert devices.mesh is not None and devices.mesh_matrix is not None
    return DTensor.from_local(
        local,
        devices.mesh,
        placements(layout_on_joined_axes(layout, devices.mesh_axes, devices.mesh_matrix)),
        # `run_check` would communicate: it compares metadata and broadcasts replicated shards.
        run_check=False,
        shape=like.shape,
        # Contiguous strides, as `like` may be a view with others.
        stride=torch.empty(like.shape, device="meta").stride(),
    )


def shard_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Replace full tensors in `state`, as saved by one device, by this rank's shards; a pre-hook of
    `load_state_dict`.

    Raises:
        PlanError: if a tensor is the shard of another rank.
    """
    # With duplicates, because a state has a tied parameter under each of its names.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        full = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(full, Tensor):
            continue
        if isinstance(full, DTensor):
            _check_mesh_coordinates(prefix + name, full, parameter)
        elif full.shape == parameter.shape:
            # In the parameter's dtype and on its device; a copy, as a view would keep `full` alive.
            shard = local_part_of(full.detach(), parameter).to(local_tensor(parameter), copy=True)
            state[prefix + name] = with_spec(shard.contiguous(), spec_of(parameter))


def _check_mesh_coordinates(name: str, saved: DTensor, parameter: DTensor) -> None:
    """Check that a DTensor is loaded at the mesh coordinates at which it was saved.

    Args:
        name: name of the tensor for errors.
        saved: the DTensor in the loaded state.
        parameter: the parameter on this rank.

    Raises:
        PlanError: if `saved` is sharded and has other coordinates, or another mesh shape, than
            `parameter`.
    """
    saved_at, loaded_at = (
        # The coordinate is None on a rank outside of the mesh.
        (tuple(tensor.device_mesh.shape), tuple(tensor.device_mesh.get_coordinate() or ()))
        for tensor in (saved, parameter)
    )
    is_sharded = not all(isinstance(placement, Replicate) for placement in saved.placements)
    if is_sharded and saved_at != loaded_at:
        raise PlanError(
            f"{name!r} in the state to load is the shard of another rank: it was saved at "
            f"coordinates {saved_at[1]} of a mesh of shape {saved_at[0]}, but this rank is at "
            f"{loaded_at[1]} of {loaded_at[0]}\nuse `sw.save_checkpoint` and "
            "`sw.load_checkpoint`; or save full tensors on rank 0: call `model.state_dict()` there "
            "inside `with sw.whole(net, rank0_only=True) as model:` on all ranks"
        )


@cache
def accept_full_optimizer_states() -> None:
    """Make optimizers of this process accept full state tensors, as saved by one device, and shard
    them."""
    registered = WeakSet[Optimizer]()

    # States loaded before the first step are sharded at that step, later ones when they are loaded.
    def before_step(optimizer: Optimizer, *_: object) -> None:
        if optimizer not in registered:
            registered.add(optimizer)
            _shard_full_optimizer_states(optimizer)
            optimizer.register_load_state_dict_post_hook(_shard_full_optimizer_states)

    register_optimizer_step_pre_hook(before_step)


def _shard_full_optimizer_states(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for key, full in state.items():
            if isinstance(full, DTensor):
                _check_mesh_coordinates(key, full, parameter)
            is_full = isinstance(full, Tensor) and not isinstance(full, DTensor)
            # Scalars, such as Adam's `step`, stay as they are.
            if is_full and full.ndim and full.shape == parameter.shape:
                shard = local_part_of(full, parameter).clone(memory_format=torch.contiguous_format)
                state[key] = with_spec(shard, spec_of(parameter))


class _ToLocalShardsFunction(torch.autograd.Function):
    """Return the local shards of DTensors; in the backward pass, wrap the gradients of the shards
    as DTensors."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        # None for parameters that the backward pass does not reach, as without sharding.
        ctx.set_materialize_grads(False)
        shards = [local_tensor(p) for p in parameters]
        ctx.specs = [
            (spec_of(p), shard.stride()) for p, shard in zip(parameters, shards, strict=True)
        ]
        # Views, since autograd treats an input that is returned unchanged as modified in place.
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        pairs = zip(gradients, ctx.specs, strict=True)
        return tuple(
            None if g is None else with_spec(with_strides(g, strides), spec)
            for g, (spec, strides) in pairs
        )


def local_shards(parameters: Mapping[str, Tensor], layout: DeviceMatrix) -> dict[str, Tensor]:
    """Return the local shards of `parameters`, by name, as differentiable functions of the
    parameters."""
    # On one device, parameters are ordinary tensors.
    if layout.num_devices == 1:
        return dict(parameters)
    shards = _ToLocalShardsFunction.apply(*parameters.values())  # type: ignore[no-untyped-call]
    return dict(zip(parameters, shards, strict=True))


def with_strides(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the gradient of a parameter in memory of the parameter's `strides`, as autograd
    accumulates it.

    Code that reads gradients relies on it: LBFGS views them as vectors, and a gradient that is
    expanded from one element cannot be changed in place.
    """
    if gradient.stride() == strides:
        return gradient
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)


def detached_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or an ordinary tensor itself, detached."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def stored_shards(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local shard of each parameter, detached."""
    return {name: detached_local(parameter) for name, parameter in parameters.items()}


def add_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Accumulate gradients of local shards, by name, into `grad` of the parameters."""
    with torch.no_grad():
        for name, gradient in gradients.items():
            parameter = parameters[name]
            accumulated = parameter.grad
            # Hooks need autograd; without hooks, its overhead is avoided.
            if has_hooks(parameter):
                if isinstance(parameter, DTensor):
                    gradient = with_spec(gradient, spec_of(parameter))
                torch.autograd.backward(parameter, gradient)
            elif accumulated is not None:
                # On local shards, without the host time that DTensor dispatch takes for each
                # parameter.
                detached_local(accumulated).add_(gradient)
            elif isinstance(parameter, DTensor):
                strides = local_tensor(parameter).stride()
                parameter.grad = with_spec(with_strides(gradient, strides), spec_of(parameter))
            else:
                parameter.grad = with_strides(gradient, parameter.stride())


def placements(tensor_layout: TensorLayout) -> tuple[Placement, ...]:
    """Return DTensor placements for a layout: one for each axis of its device matrix.

    Varying axes are replicated, as DTensor does not distinguish the two.
    """
    layout = tensor_layout.layout
    result: list[Placement] = [Replicate()] * len(layout.device_matrix)
    for axis in tensor_layout.partial:
        result[axis] = Partial("sum")
    for dim, axes in enumerate(tensor_layout.axes):
        for position, axis in enumerate(axes):
            # DTensor shards by mesh axes from left to right. An axis that shards a dimension after
            # an axis to its right needs a strided shard.
            coarser = layout.size(other for other in axes[:position] if other > axis)
            strided = coarser > 1
            result[axis] = StridedShard(dim, split_factor=coarser) if strided else Shard(dim)
    return tuple(result)


def from_placements(
    placements: Sequence[Placement], layout: DeviceMatrix, ndim: int
) -> TensorLayout:
    """Convert DTensor placements to a layout.

    Args:
        placements: one placement for each axis of `layout`.
        layout: the mesh as a device matrix.
        ndim: number of dimensions of the DTensor.

    Raises:
        LayoutError: if the numbers of placements and axes differ, a partial placement is not a
            sum, a dimension does not exist, or a `split_factor` is not a product of axis sizes.
    """
    if len(placements) != len(layout.device_matrix):
        raise LayoutError(
            f"{len(placements)} placements {tuple(placements)} do not match a device matrix with"
            f" {len(layout.device_matrix)} axes {layout.device_matrix}\n"
            "pass one placement for each axis"
        )
    dims: list[Axes] = [()] * ndim
    partial = set()
    # From right to left, as the axes that shard a dimension before `axis` are to its right.
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, Shard | StridedShard):
            dim = _normalize_dim(placement, ndim)
            dims[dim] = _insert_axis_by_split_factor(dims[dim], axis, placement, layout)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.add(axis)
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"placement {placement} on axis {layout.alias_names[axis]!r} is not supported by"
                " layouts\n"
                "use one of `Shard`, `_StridedShard`, `Replicate` and `Partial('sum')`"
            )
    return TensorLayout(layout, tuple(dims), frozenset(partial))


def _normalize_dim(placement: Shard | StridedShard, ndim: int) -> int:
    dim = placement.dim
    if not -ndim <= dim < ndim:
        raise LayoutError(
            f"placement {placement} shards dimension {dim} of a tensor with {ndim} dimensions\n"
            f"use a dimension from 0 to {ndim - 1}"
        )
    return dim % ndim


def _insert_axis_by_split_factor(
    axes: Axes, axis: int, placement: Placement, layout: DeviceMatrix
) -> Axes:
    """Insert `axis` into the axes that shard one dimension, from outermost to innermost.

    A `split_factor` is the product of the sizes of the axes before `axis`; without one, `axis` is
    first.

    Args:
        axes: the axes to the right of `axis` that shard the same dimension.
        axis: the axis to insert.
        placement: the placement of `axis`.
        layout: the mesh as a device matrix.
    """
    coarser = placement.split_factor if isinstance(placement, StridedShard) else 1
    for position in range(len(axes) + 1):
        if layout.size(axes[:position]) == coarser:
            return (*axes[:position], axis, *axes[position:])
    raise LayoutError(
        f"placement {placement} on axis {layout.alias_names[axis]!r} has split factor {coarser},"
        " which is not a product of sizes of axes to its right that shard the same dimension\n"
        "use `Shard`, which needs no split factor, or a product of these sizes"
    )

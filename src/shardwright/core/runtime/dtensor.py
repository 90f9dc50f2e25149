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
from shardwright.core.layout.joined_axes import on_joined_axes
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
    tensor: Tensor, where: TensorLayout, devices: Devices, *, copy: bool = True
) -> DTensor:
    """Shard a full `tensor` without communication, and return this rank's shard as a DTensor.

    Args:
        copy: False if a block that is the whole may share its memory.
    """
    block = tensor.detach()[where.slices(devices.rank, tuple(tensor.shape))]
    local = block.to(devices.device, copy=copy or block.shape != tensor.shape)
    return as_dtensor(local.contiguous(), tensor, where, devices)


def as_dtensor(local: Tensor, like: Tensor, where: TensorLayout, devices: Devices) -> DTensor:
    """A DTensor of the shape of `like` with this shard on this rank; communicates nothing.

    Raises:
        LayoutError: if `where` parts axes that are one in the mesh of the devices.
    """
    assert devices.mesh is not None and devices.mesh_layout is not None
    return DTensor.from_local(
        local,
        devices.mesh,
        placements(on_joined_axes(where, devices.mesh_axes, devices.mesh_layout)),
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


def shard_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """State dict pre-hook: replace full tensors, as one device saves them, by this rank's shards.

    Raises:
        PlanError: for the part of another rank.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        whole = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(whole, Tensor):
            continue
        if isinstance(whole, DTensor):
            _check_is_own(prefix + name, whole, parameter)
        elif whole.shape == parameter.shape:
            mine = local_part_of(whole.detach(), parameter).to(local_tensor(parameter), copy=True)
            state[prefix + name] = with_spec(mine.contiguous(), spec_of(parameter))


def _check_is_own(name: str, part: DTensor, parameter: DTensor) -> None:
    """Check that a DTensor that one rank saved is loaded at the same coordinates of the mesh.

    Raises:
        PlanError: if `part` has another place than `parameter`.
    """
    theirs, mine = (
        (tuple(tensor.device_mesh.shape), tuple(tensor.device_mesh.get_coordinate() or ()))
        for tensor in (part, parameter)
    )
    is_cut = not all(isinstance(placement, Replicate) for placement in part.placements)
    if is_cut and theirs != mine:
        raise PlanError(
            f"{name!r} in the state to load is the part at {theirs[1]} of a mesh {theirs[0]}, but "
            f"this rank is at {mine[1]} of {mine[0]}: another rank has saved it. Use "
            "`shardwright.save_checkpoint` and `load_checkpoint`; or let all ranks enter `with "
            "shardwright.whole(net, rank0_only=True) as model:`, where rank 0 saves whole tensors "
            "(`model.state_dict()`)"
        )


@cache
def accept_full_optimizer_states() -> None:
    """Make optimizers of this process accept states of full tensors, as one device saves them: each
    rank takes its shard."""
    seen = WeakSet[Optimizer]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        if optimizer not in seen:
            seen.add(optimizer)
            _cut_whole_states(optimizer)
            optimizer.register_load_state_dict_post_hook(_cut_whole_states)

    register_optimizer_step_pre_hook(before_step)


def _cut_whole_states(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for key, whole in state.items():
            if isinstance(whole, DTensor):
                _check_is_own(key, whole, parameter)
            is_whole = isinstance(whole, Tensor) and not isinstance(whole, DTensor)
            if is_whole and whole.ndim and whole.shape == parameter.shape:
                mine = local_part_of(whole, parameter).clone(memory_format=torch.contiguous_format)
                state[key] = with_spec(mine, spec_of(parameter))


class _LocalShards(torch.autograd.Function):
    """Return the local shards of all DTensors at once, and their gradients as DTensors."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs = [spec_of(p) for p in parameters]
        return tuple(shard.view_as(shard) for shard in map(local_tensor, parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        pairs = zip(gradients, ctx.specs, strict=True)
        return tuple(None if g is None else with_spec(g, spec) for g, spec in pairs)


def local_shards(parameters: Mapping[str, Tensor], layout: DeviceMatrix) -> dict[str, Tensor]:
    """The local tensors that the program reads; gradients flow back into `parameters`."""
    if layout.num_devices == 1:
        return dict(parameters)
    shards = _LocalShards.apply(*parameters.values())  # type: ignore[no-untyped-call]
    return dict(zip(parameters, shards, strict=True))


def detached_local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or a plain tensor itself, detached."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def stored_shards(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The local shard of each parameter, detached."""
    return {name: detached_local(parameter) for name, parameter in parameters.items()}


def add_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Accumulate gradients of local shards into the `grad` of their parameters."""
    with torch.no_grad():
        for name, gradient in gradients.items():
            parameter = parameters[name]
            before = parameter.grad
            if has_hooks(parameter):
                if isinstance(parameter, DTensor):
                    gradient = with_spec(gradient, spec_of(parameter))
                torch.autograd.backward(parameter, gradient)
            elif before is not None:
                detached_local(before).add_(gradient)
            elif isinstance(parameter, DTensor):
                parameter.grad = with_spec(gradient, spec_of(parameter))
            else:
                parameter.grad = gradient


def placements(tensor_layout: TensorLayout) -> tuple[Placement, ...]:
    """One placement for each axis of a `DeviceMesh` with the layout's axes.

    Varying axes are replicated: a DTensor does not know the difference.
    """
    layout = tensor_layout.layout
    result: list[Placement] = [Replicate()] * len(layout.device_matrix)
    for axis in tensor_layout.partial:
        result[axis] = Partial("sum")
    for dim, axes in enumerate(tensor_layout.axes):
        for place, axis in enumerate(axes):
            coarser = layout.size(other for other in axes[:place] if other > axis)
            strided = coarser > 1
            result[axis] = StridedShard(dim, split_factor=coarser) if strided else Shard(dim)
    return tuple(result)


def from_placements(
    placements: Sequence[Placement], layout: DeviceMatrix, ndim: int
) -> TensorLayout:
    """The layout of a DTensor with `ndim` dimensions on a mesh with the axes of `layout`.

    Raises:
        LayoutError: if there is not one placement for each axis, a sum is none, a dimension does
            not exist, or a `split_factor` fits no order of the axes.
    """
    if len(placements) != len(layout.device_matrix):
        raise LayoutError(
            f"{len(placements)} placements {tuple(placements)} on a device matrix of"
            f" {len(layout.device_matrix)} axes {layout.device_matrix}; give one for each axis"
        )
    dims: list[Axes] = [()] * ndim
    partial = set()
    # From the right, as then each axis finds those that may stand before it.
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, Shard | StridedShard):
            dim = _dimension(placement, ndim)
            dims[dim] = _inserted(dims[dim], axis, placement, layout)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.add(axis)
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"placement {placement} on axis {layout.alias_names[axis]!r}: a layout can say"
                " Shard, _StridedShard, Replicate and Partial('sum')"
            )
    return TensorLayout(layout, tuple(dims), frozenset(partial))


def _dimension(placement: Shard | StridedShard, ndim: int) -> int:
    dim = placement.dim
    if not -ndim <= dim < ndim:
        raise LayoutError(f"placement {placement} cuts a dimension that {ndim} dimensions lack")
    return dim % ndim


def _inserted(axes: Axes, axis: int, placement: Placement, layout: DeviceMatrix) -> Axes:
    """Insert `axis` into `axes`, which are all to its right, behind as many shards as its placement
    (a `_StridedShard`) has before it."""
    coarser = placement.split_factor if isinstance(placement, StridedShard) else 1
    for place in range(len(axes) + 1):
        if layout.size(axes[:place]) == coarser:
            return (*axes[:place], axis, *axes[place:])
    raise LayoutError(
        f"placement {placement} on axis {layout.alias_names[axis]!r}: no axes to its right that"
        f" cut the same dimension have {coarser} devices together"
    )

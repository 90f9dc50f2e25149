"""Replacement of the parameters and buffers of a model, or of a copy, by their planned shards."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.deferred import (
    Deferred,
    copies_of_attributes,
    materialize_attributes,
    values_of,
)
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.parallel.uninitialized import Initialization, initialization_of
from shardwright.core.parallel.uninitialized_tensors import UninitializedShard, UninitializedTensor
from shardwright.core.partition.decisions import Storage
from shardwright.core.runtime.adopt_optimizer import mark_origins, mark_planned
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import (
    accept_full_optimizer_states,
    as_dtensor,
    local_shard,
    shard_full_tensors,
)
from shardwright.core.runtime.dtensor_results import correct_dtensor_results
from shardwright.core.runtime.muon import orthogonalize_full_matrices
from shardwright.core.runtime.parameter_hooks import has_hooks, move_hooks
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dtensor import (
    local_tensor,
    share_version_counter,
    spec_of,
    with_spec,
)
from shardwright.core.torch_internals.modules import (
    memo_of_process_groups,
    own_buffers,
    own_parameters,
    restore_flat_weights,
)

Registry = MutableMapping[str, Any]
"""`_parameters`, `_buffers` or `__dict__` of one module."""

REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module that contain its registered parameters, buffers and submodules."""


@dataclass(frozen=True)
class StoragePlan:
    """The sharded storage of a model's parameters and buffers on this rank.

    Args:
        storage: the axes that shard each dimension of each parameter, by the parameter's name.
        devices: this rank's view of the devices.
        initialization: pending initialization of the parameters on the meta device.
        other_stage_names: names of parameters and buffers that this rank's pipeline stage does not
            own.
        release: whether to free the memory of each full parameter after its shard is copied.
    """

    storage: Storage
    devices: Devices
    initialization: Initialization
    other_stage_names: Collection[str] = frozenset()
    release: bool = False

    def shard(self, name: str, full: Tensor, *, is_parameter: bool) -> Tensor:
        """Return this rank's shard of `full`: a copy, or with `release` possibly a view.

        Args:
            name: name of the parameter or buffer.
            full: the full tensor.
            is_parameter: whether `full` is a parameter; buffers are replicated.
        """
        if name in self.other_stage_names:
            # No program of this stage reads it; the caller puts None in its place.
            return full.new_empty(0)
        # The user allocates it later by `to_empty`.
        if full.is_meta and self.devices.device.type != "meta":
            return self._make_meta_shard(name, full, is_parameter=is_parameter)
        # Buffers are replicated: programs read and update them in full.
        if self.devices.mesh is None or not is_parameter:
            keeps = not (self.release and is_parameter)
            return full.detach().to(self.devices.device, copy=keeps)
        axes = tuple(self.storage.get(name, ((),) * full.ndim))
        where = TensorLayout(self.devices.matrix, axes)
        return local_shard(full, where, self.devices, copy=not self.release)

    def _make_meta_shard(self, name: str, full: Tensor, *, is_parameter: bool) -> Tensor:
        if self.devices.mesh is None or not is_parameter:
            return full.detach()
        axes = tuple(self.storage.get(name, ((),) * full.ndim))
        where = TensorLayout(self.devices.matrix, axes)
        # `full` is on the meta device, so the slice only computes the shape of the shard.
        local = torch.empty_like(full[where.slices(self.devices.rank, tuple(full.shape))])
        return as_dtensor(local.contiguous(), full, where, self.devices)

    def shards(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this rank's shard of each tensor, and remove it from `tensors`.

        Deferred tensors come first: if their initialization fails, the model is still unchanged.

        Raises:
            DeferredError: for a deferred tensor that cannot be initialized.
        """
        on_meta = self.devices.device.type == "meta"
        if not on_meta:
            parameters = {n for n, t in tensors.items() if isinstance(t, nn.Parameter)}
            # Replays the record of one parameter after another, and keeps only its shard.
            yield from values_of(
                tensors, lambda n, full: self.shard(n, full, is_parameter=n in parameters)
            ).items()
        # A list first, as the loop removes the entries.
        for name in [n for n, t in tensors.items() if on_meta or not isinstance(t, Deferred)]:
            tensor = tensors.pop(name)
            is_parameter = isinstance(tensor, nn.Parameter)
            full = tensor
            # On the meta device deferred tensors become ordinary meta tensors, without a replay.
            if on_meta:
                full = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            shard = self.shard(name, full, is_parameter=is_parameter)
            # In place, so that the memory is freed although optimizers refer to the parameter.
            if self.release and is_parameter and not tensor.is_meta:
                tensor.data = tensor.data.new_empty(0)
            # A generator keeps its variables while it is suspended, and so a full tensor alive.
            del tensor, full
            yield name, shard

    def parameter(self, name: str, local: Tensor, original: nn.Parameter) -> nn.Parameter:
        """Make `local`, this rank's shard, a parameter with the hooks of the user's `original`."""
        shard = partial(self.shard, name, is_parameter=True)
        if name in self.initialization.names and self.devices.is_distributed:
            pending = self.initialization.pending
            unset: UninitializedShard | UninitializedTensor
            if isinstance(local, DTensor):
                unset = UninitializedShard.of(local_tensor(local), local, pending)
            else:
                unset = UninitializedTensor.of(local, pending)
            if has_hooks(original):
                # Not yet: with hooks it would be a leaf of autograd, which cannot be swapped later.
                unset.move_hooks = partial(move_hooks, parameter=original, shard=shard)
            return nn.Parameter(unset, requires_grad=original.requires_grad)
        parameter = as_parameter(local, original)
        move_hooks(parameter, original, shard)
        return parameter


def store_in_place(module: nn.Module, plan: StoragePlan) -> None:
    """Replace the parameters of `module` by DTensors, and move its buffers to the device.

    Tied parameters stay tied, and tensors of other stages become None. Tensors are replaced one
    after another, so that peak memory is one full tensor and all shards, unless other objects refer
    to the full tensors. On one device parameters stay the same objects.

    Raises:
        DeferredError: for a deferred tensor that cannot be initialized; `module` is then unchanged.
    """
    _install_dtensor_extensions()
    tensors = _collect_parameters_and_buffers(module)
    # Before parameters are replaced: `adopt` finds new parameters by the origins of the old ones.
    origins, parameters = mark_origins(module, module), _pop_unreplaced_tensors(tensors, plan)
    references = _TensorReferences(module, tensors)
    for name, shard in plan.shards(dict(tensors)):
        original = tensors.pop(name)
        stored: Tensor | None = shard
        if name in plan.other_stage_names:
            stored = None
        elif isinstance(original, nn.Parameter):
            stored = parameters[name] = plan.parameter(name, shard, original)
        references.replace(original, stored)
    # After all tensors, as one attribute may list several, such as `_flat_weights`.
    references.finish(module)
    materialize_attributes(module)
    mark_planned(parameters, origins)
    _register_state_dict_hooks(module, plan)


def stored_copy(module: nn.Module, plan: StoragePlan) -> nn.Module:
    """Return a copy of `module` with DTensor parameters, and with buffers on the device.

    `module` is unchanged, except that with `plan.release` its parameters become empty tensors.

    Raises:
        DeferredError: for a deferred tensor that cannot be initialized.
    """
    _install_dtensor_extensions()
    tensors = _collect_parameters_and_buffers(module)
    memo: dict[int, Any] = {**copies_of_attributes(module), **memo_of_process_groups(module)}
    parameters: dict[str, nn.Parameter] = {}
    for name, shard in plan.shards(dict(tensors)):
        original, stored = tensors[name], shard
        if isinstance(original, nn.Parameter) and name not in plan.other_stage_names:
            stored = parameters[name] = plan.parameter(name, shard, original)
        # `deepcopy` puts the stored tensor wherever the model refers to the given tensor.
        memo[id(original)] = None if name in plan.other_stage_names else stored
    result = copy.deepcopy(module, memo)
    mark_planned(parameters, mark_origins(module, result))
    _register_state_dict_hooks(result, plan)
    return result


def copied_parameters(module: nn.Module, excluded: Collection[int]) -> dict[int, nn.Parameter]:
    """Copy the parameters of a planned module; return the copies by id, for a `deepcopy` memo.

    Args:
        module: a planned module.
        excluded: ids of parameters that are already in the memo and are not copied.
    """
    return {
        id(parameter): as_parameter(_copy_parameter_data(parameter), parameter)
        for parameter in module.parameters()
        if id(parameter) not in excluded
    }


class _TensorReferences:
    """The places in a module and its submodules that refer to a tensor: registries of parameters
    and buffers, and plain attributes."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._registered: dict[int, list[tuple[Registry, str]]] = {}
        self._attributes: list[tuple[Registry, str]] = []
        self._replaced: dict[int, tuple[Tensor, Tensor | None]] = {}
        # By identity, as `==` of tensors compares elements.
        identities = {id(tensor) for tensor in tensors.values()}
        for child in module.modules():
            for registry in (own_parameters(child), own_buffers(child)):
                for name, tensor in registry.items():
                    if tensor is not None:
                        self._registered.setdefault(id(tensor), []).append((registry, name))
            # Plain attributes, such as `_flat_weights` of a recurrent layer.
            for name, value in vars(child).items():
                if name not in REGISTRIES and identities & set(map(id, pytree.tree_leaves(value))):
                    self._attributes.append((vars(child), name))
        mentioned = (pytree.tree_leaves(registry[name]) for registry, name in self._attributes)
        self._tensors_in_attributes = {id(leaf) for leaves in mentioned for leaf in leaves}

    def replace(self, tensor: Tensor, new: Tensor | None) -> None:
        """Replace `tensor` in the registries of parameters and buffers by `new`.

        `finish` replaces it in plain attributes.
        """
        for registry, name in self._registered.pop(id(tensor)):
            registry[name] = new
        if id(tensor) in self._tensors_in_attributes:
            self._replaced[id(tensor)] = tensor, new

    def finish(self, module: nn.Module) -> None:
        """Replace in plain attributes the tensors for which `replace` was called."""

        def renewed(leaf: Any) -> Any:
            return self._replaced[id(leaf)][1] if id(leaf) in self._replaced else leaf

        for registry, name in self._attributes:
            registry[name] = pytree.tree_map(renewed, registry[name])
        for child in module.modules():
            # Recurrent layers have weak references to their parameters, for cuDNN's flat weights.
            if isinstance(child, nn.RNNBase):
                restore_flat_weights(child)


def _install_dtensor_extensions() -> None:
    correct_dtensor_results()
    accept_full_optimizer_states()
    orthogonalize_full_matrices()


def _collect_parameters_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _pop_unreplaced_tensors(
    tensors: dict[str, Tensor], plan: StoragePlan
) -> dict[str, nn.Parameter]:
    """Remove from `tensors` those that stay in the module; return the removed parameters.

    Buffers that are already on the device stay. On one device parameters stay too; their data is
    moved to the device.
    """
    device, parameters = plan.devices.device, {}
    for name, tensor in list(tensors.items()):
        # Replaced in any case, by its value or by None.
        if isinstance(tensor, Deferred) or name in plan.other_stage_names:
            continue
        if not isinstance(tensor, nn.Parameter):
            if tensor.device == device:
                del tensors[name]
        elif plan.devices.mesh is None and device.type != "meta":
            # Such a parameter becomes an `UninitializedTensor`, since its initialization is
            # recorded with that of the other stages.
            if tensor.is_meta and plan.devices.stages > 1:
                continue
            if not tensor.is_meta and tensor.device != device:
                # `data`, so that the parameter stays the object to which an optimizer refers.
                tensor.data = tensor.data.to(device)
            parameters[name] = tensor
            del tensors[name]
    return parameters


def _register_state_dict_hooks(module: nn.Module, plan: StoragePlan) -> None:
    if plan.initialization.names:
        # Before the hook that shards full tensors, which puts shards on the parameters' device.
        module.register_load_state_dict_pre_hook(_allocate_before_loading_state)  # type: ignore[no-untyped-call]
        module.register_state_dict_pre_hook(_replay_initialization_before_saving)  # type: ignore[no-untyped-call]
    if plan.devices.mesh is not None:
        module.register_load_state_dict_pre_hook(shard_full_tensors)  # type: ignore[no-untyped-call]


def _allocate_before_loading_state(module: nn.Module, *_: object) -> None:
    """Pre-hook of `load_state_dict` that allocates parameters on the meta device."""
    initialization = initialization_of(module)
    if initialization is not None:
        initialization.allocate_memory(module)


def _replay_initialization_before_saving(module: nn.Module, *_: object) -> None:
    """Pre-hook of `state_dict` that replays recorded initializations, so that the state dict has
    values."""
    initialization = initialization_of(module)
    if initialization is not None:
        initialization.replay_record(module, only_this_rank=True)


def as_parameter(stored: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return the tensor `stored` as a parameter with the `requires_grad` of `like`."""
    # In-place changes of the shard, by an optimizer with foreach kernels, must count for the
    # parameter that autograd checks.
    new = nn.Parameter(stored, requires_grad=like.requires_grad)
    return share_version_counter(new) if isinstance(new, DTensor) else new


def _copy_parameter_data(parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, UninitializedTensor):
        return parameter.new_memory(parameter.device)
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    return with_spec(local_tensor(tensor).clone(), spec_of(tensor))

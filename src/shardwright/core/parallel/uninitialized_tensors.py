"""Uninitialized parameters of a model that was planned on the meta device.

The parameters are on the meta device until `to_empty`. From then on the operators that initialize
them are recorded on full tensors and replayed when values are needed, so that each rank gets its
shards of the values that one device would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.deferred import Deferred, Record, deferred_like, is_initialized, value_of
from shardwright.core.runtime.parameter_hooks import has_hooks
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import plain_torch_function
from shardwright.core.torch_internals.dtensor import (
    dtensor_of_class,
    local_part_of,
    local_tensor,
    share_version_counter,
    spec_of,
    with_spec,
)
from shardwright.core.torch_internals.operators import schema_of
from shardwright.core.torch_internals.tensors import as_subclass
from shardwright.errors import PlanError

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class PendingInit:
    """The recorded initialization of a model with uninitialized tensors.

    Args:
        record: the operators that initialize the model.
        device: the device on which the planned model computes.
    """

    record: Record
    device: torch.device

    def check_device(self, device: torch.device) -> None:
        """Check that memory may be allocated on `device`.

        Raises:
            PlanError: if `device` is of another type than the device of the planned model.
        """
        if device.type != self.device.type:
            raise PlanError(
                f"a model planned for device {str(self.device)!r} cannot be allocated on "
                f"{str(device)!r}\ncall `net.to_empty(device={str(self.device)!r})`"
            )


class Uninitialized(Tensor):
    """An uninitialized tensor of a planned model.

    Operators on the tensor run on the meta device before `to_empty`; after it they are recorded on
    the full tensor. When the tensor is initialized, the same object becomes an ordinary parameter.
    """

    pending: PendingInit
    full: Deferred | None
    """Deferred tensor that records the initialization of the full tensor; None before
    `to_empty`."""

    move_hooks: Callable[[Tensor], object] | None = None
    """Function that registers the hooks of this parameter on the initialized parameter that
    replaces it."""

    # `Deferred` looks for this attribute, and leaves operators on both classes to this class.
    records_in_its_place = True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Uninitialized)]
        # `nn.Parameter` detaches: the result records into the same full tensor.
        if function in (aten.detach.default, aten.alias.default):
            return tensors[0].view_with(tensors[0].full)
        device = kwargs.get("device")
        # `nn.Module.to_empty` calls `empty_like` with the new device.
        if function is aten.empty_like.default and device is not None and device.type != "meta":
            tensors[0].pending.check_device(device)
            return tensors[0].with_memory(device)
        # `to` and `half` would give a tensor of another device or dtype than the program expects.
        if function is aten._to_copy.default:
            raise PlanError(
                "a planned model cannot be converted or moved before it is initialized\n"
                "convert the model before `sw.plan`; allocate it with `net.to_empty(device=...)`"
            )
        substituted = dict[int, Tensor]()
        # Before `to_empty` there is no record: operators only check shapes on the meta device.
        substitute = (
            _substitute_meta_tensor
            if any(t.full is None for t in tensors)
            else _substitute_deferred_tensor
        )
        args, kwargs = pytree.tree_map_only(
            Tensor, partial(substitute, substituted), (args, kwargs)
        )
        results = function(*args, **kwargs)
        # Results of other operators are new tensors; in-place operators return an argument.
        if not schema_of(function).is_mutable:
            return results
        return pytree.tree_map_only(Tensor, lambda t: substituted.get(id(t), t), results)

    def is_initialized(self) -> bool:
        """Whether the record contains an operator that initializes the full tensor."""
        return self.full is not None and is_initialized(self.full)

    def view_with(self, full: Deferred | None) -> Self:
        """Return an alias of this tensor's memory, whose operators are recorded in `full`."""
        raise NotImplementedError

    def with_memory(self, device: torch.device) -> Tensor:
        """Return a copy of this tensor with memory on `device`; operators on it are recorded."""
        raise NotImplementedError

    def on_meta(self) -> Tensor:
        """Return an ordinary tensor on the meta device with the metadata of this tensor."""
        raise NotImplementedError

    def _register_user_hooks(self) -> None:
        if move_hooks := vars(self).pop("move_hooks", None):
            move_hooks(self)

    def _attach_initialization(self, pending: PendingInit, full: Deferred | None) -> Self:
        self.pending, self.full = pending, full
        return self


class UninitializedShard(Uninitialized, DTensor):
    """An uninitialized local shard, on the meta device or, after `to_empty`, in allocated
    memory."""

    @classmethod
    def of(cls, local: Tensor, like: DTensor, pending: PendingInit) -> UninitializedShard:
        """Wrap `local` as a shard with the mesh, placements and shape of `like`."""
        result = dtensor_of_class(cls, local, spec_of(like))
        assert isinstance(result, UninitializedShard)
        return result._attach_initialization(pending, None)

    def to_local(self, **kwargs: Any) -> Tensor:
        """Make this an ordinary DTensor with its recorded values, and return the local shard."""
        self.make_ordinary_with_value()
        # Not this method: the class of the object is now `DTensor`.
        return self.to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        self.make_ordinary_with_value()
        return self.full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        self.make_ordinary_with_value()
        return self.redistribute(*args, **kwargs)

    def make_ordinary_with_value(self) -> None:
        """Make this shard an ordinary DTensor, and write its recorded values, if any."""
        if self.full is not None and is_initialized(self.full):
            self.store(value_of(self.full))
        self.make_ordinary()

    def store(self, value: Tensor) -> None:
        """Copy this rank's shard of the full tensor `value` into the memory of this tensor."""
        with torch.no_grad():
            local_tensor(self).copy_(local_part_of(value, self))

    def make_ordinary(self) -> None:
        del self.pending, self.full
        self.__class__ = DTensor  # type: ignore[assignment]
        # A parameter with hooks is already a leaf of autograd, and cannot be swapped.
        if isinstance(self, nn.Parameter) and not has_hooks(self):
            same = with_spec(local_tensor(self), spec_of(self))
            # An in-place step of an optimizer must also count for the local shard that autograd has
            # saved.
            counting = share_version_counter(same).requires_grad_(self.requires_grad)
            # `swap_tensors` also swaps the attributes.
            vars(counting).update(vars(self))
            torch.utils.swap_tensors(self, counting)  # type: ignore[no-untyped-call]
        Uninitialized._register_user_hooks(self)

    def allocate_memory(self) -> None:
        """Allocate this shard, make it an ordinary DTensor, and write recorded values, if any."""
        if local_tensor(self).is_meta:
            # Swapped, so that the parameter stays the object to which optimizers refer.
            new = nn.Parameter(self.with_memory(self.pending.device), self.requires_grad)
            torch.utils.swap_tensors(self, new)  # type: ignore[no-untyped-call]
        self.make_ordinary_with_value()

    def view_with(self, full: Deferred | None) -> UninitializedShard:
        return self._copy_with_local_tensor(local_tensor(self), full)

    def with_memory(self, device: torch.device) -> UninitializedShard:
        local = torch.empty_like(local_tensor(self), device=device)
        mark_uninitialized(local)
        return self._copy_with_local_tensor(local, deferred_like(self, self.pending.record))

    def on_meta(self) -> DTensor:
        return with_spec(local_tensor(self), spec_of(self))

    def _copy_with_local_tensor(self, local: Tensor, full: Deferred | None) -> UninitializedShard:
        result = UninitializedShard.of(local, self, self.pending)
        # Attributes such as the marks of a parameter and of an optimizer's parameter.
        vars(result).update(vars(self))
        return result._attach_initialization(self.pending, full)


class UninitializedTensor(Uninitialized, Tensor):
    """An uninitialized parameter that is no DTensor: of a stage with one device, or of another
    stage.

    The initialization of a model draws the parameters of all stages one after another, so each
    stage also records the initialization of other stages' parameters. The tensor has no memory
    until it is initialized. After `to_empty` its `device` is the planned device, as `nn.init` skips
    tensors on the meta device.
    """

    __torch_function__ = plain_torch_function  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta") if self.full is None else self.pending.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.full is None

    @classmethod
    def of(cls, like: Tensor, pending: PendingInit) -> UninitializedTensor:
        # With the strides, so that the allocated memory has the layout of the user's parameter.
        on_meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return as_subclass(cls, on_meta)._attach_initialization(pending, None)

    def allocate_memory(self) -> None:
        """Make this tensor an ordinary parameter with recorded values, or uninitialized memory."""
        if self.full is not None and is_initialized(self.full):
            self.set_value(value_of(self.full).to(self.pending.device))
        else:
            self.set_value(self.new_memory(self.pending.device))

    def make_ordinary(self) -> None:
        """Make this tensor an ordinary parameter on the meta device, which no program reads."""
        self.set_value(self.on_meta())

    def new_memory(self, device: torch.device) -> Tensor:
        """Return uninitialized memory on `device` with the shape, strides and dtype of this
        tensor."""
        memory = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=device)
        if device.type != "meta":
            mark_uninitialized(memory)
        return memory

    def set_value(self, value: Tensor) -> None:
        """Make this object an ordinary parameter with the values of `value`."""
        new = nn.Parameter(value, requires_grad=self.requires_grad)
        del self.pending, self.full
        vars(new).update(vars(self))
        torch.utils.swap_tensors(self, new)  # type: ignore[no-untyped-call]
        Uninitialized._register_user_hooks(self)

    def view_with(self, full: Deferred | None) -> UninitializedTensor:
        result = UninitializedTensor.of(self, self.pending)
        vars(result).update(vars(self))
        return result._attach_initialization(self.pending, full)

    def with_memory(self, device: torch.device) -> UninitializedTensor:
        # `nn.Module.to_empty` keeps this object, and assigns the result as its data, also without
        # memory.
        self.full = deferred_like(self, self.pending.record)
        return self.view_with(self.full)

    def on_meta(self) -> Tensor:
        return self.new_memory(torch.device("meta"))


def _substitute_meta_tensor(substituted: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Return an ordinary meta tensor for an `Uninitialized`; other tensors unchanged.

    Args:
        substituted: filled with the replaced tensors, by id of the meta tensor.
        tensor: an argument of an operator.
    """
    if not isinstance(tensor, Uninitialized):
        return tensor
    ordinary = tensor.on_meta()
    # The id is unique as long as the call of the operator refers to all its meta tensors.
    substituted[id(ordinary)] = tensor
    return ordinary


def _substitute_deferred_tensor(substituted: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Return the tensor on which the record is replayed: deferred, or on the CPU.

    An `Uninitialized` is replaced by its deferred full tensor; other tensors are gathered to the
    CPU.

    Args:
        substituted: filled with the replaced tensors, by id of the deferred tensor.
        tensor: an argument of an operator.
    """
    if isinstance(tensor, Uninitialized):
        assert tensor.full is not None
        substituted[id(tensor.full)] = tensor
        return tensor.full
    # Results of operators on uninitialized tensors are deferred already.
    if isinstance(tensor, Deferred):
        return tensor
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def mark_uninitialized(tensor: Tensor) -> None:
    """Fill `tensor` with NaN or the smallest integer, by which `is_uninitialized` recognizes it."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        # Narrower integers and booleans have no value to spare.
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def is_uninitialized(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, or all its elements have the value set by
    `mark_uninitialized`."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if local.is_meta:
        return True
    # `all` of an empty shard would be true.
    if not local.numel():
        return False
    if local.is_floating_point() or local.is_complex():
        # All elements, as a single NaN may be a value.
        return bool(local.isnan().all())
    if local.dtype in (torch.int32, torch.int64):
        return bool((local == torch.iinfo(local.dtype).min).all())
    return False

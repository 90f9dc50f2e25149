"""Parameters of a model that was planned on the meta device, until they have values.

`parallelize` gives such a model meta shards. `to_empty` gives each rank the memory of its shards,
and from then on the model's own initialization is recorded on whole tensors, as inside of
`no_init_parameters`, and replayed shard by shard: so the values are those of one device, where an
operator on shards would draw other numbers or lose a write to one row. Memory without values is
filled with NaN, so that it can be told from what was initialized.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.agreement.collective import (
    check_description,
    gathered,
    take_values_of_rank_0,
    values_of_ranks,
)
from shardwright.core.deferred import (
    Deferred,
    Record,
    deferred_like,
    init_record_lines,
    is_initialized,
    materialize_attributes,
    recording,
    share_generator_states,
    value_of,
    values_of,
)
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.parameter_hooks import has_hooks
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dtensor import (
    local_part_of,
    local_tensor,
    of_class,
    share_version_counter,
    spec_of,
    with_spec,
)
from shardwright.core.torch_internals.modules import own_buffers
from shardwright.core.torch_internals.operators import schema_of
from shardwright.errors import PlanError

aten = torch.ops.aten

MOST_NAMES = 5
"""Names of parameters that an error lists."""


class UninitializedShard(DTensor):
    """A shard without values: on the meta device, or after `to_empty` in memory of its own.

    Operators on it run on the meta device, or are recorded on the whole tensor. It becomes an
    ordinary DTensor, as the same object, when it gets its values.
    """

    initialization: Initialization
    whole: Deferred | None
    """What records the initialization of the whole tensor; None before `to_empty`."""

    records_in_its_place = True

    @classmethod
    def of(cls, local: Tensor, like: DTensor, initialization: Initialization) -> UninitializedShard:
        """A shard in the memory of `local` with the mesh, placements and shape of `like`."""
        result = of_class(cls, local, spec_of(like))
        assert isinstance(result, UninitializedShard)
        result.initialization, result.whole = initialization, None
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shards = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)]
        if function in (aten.detach.default, aten.alias.default):
            return shards[0]._again(local_tensor(shards[0]), shards[0].whole)
        device = kwargs.get("device")
        if function is aten.empty_like.default and device is not None and device.type != "meta":
            return shards[0]._with_memory(device)
        if function is aten._to_copy.default:
            raise PlanError(
                "a planned model without values is to be converted or moved\n"
                "convert it before `plan`; give it memory by `net.to_empty(device=...)`"
            )
        given = dict[int, UninitializedShard]()
        substitute = _meta_shard if any(s.whole is None for s in shards) else _recorded
        args, kwargs = pytree.tree_map_only(Tensor, partial(substitute, given), (args, kwargs))
        results = function(*args, **kwargs)
        if not schema_of(function).is_mutable:
            return results
        return pytree.tree_map_only(Tensor, lambda t: given.get(id(t), t), results)

    def to_local(self, **kwargs: Any) -> Tensor:
        """This rank's shard, with the values that were recorded; others may be written to it."""
        self.take_value()
        return self.to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        self.take_value()
        return self.full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        self.take_value()
        return self.redistribute(*args, **kwargs)

    def take_value(self) -> None:
        """Replays what was recorded for this parameter, and makes it an ordinary DTensor; without
        a value it keeps its memory as it is."""
        if self.whole is not None and is_initialized(self.whole):
            self.store(value_of(self.whole))
        self.become_ordinary()

    def store(self, value: Tensor) -> None:
        """Copies this rank's part of a whole tensor into the memory of the shard."""
        with torch.no_grad():
            local_tensor(self).copy_(local_part_of(value, self))

    def become_ordinary(self) -> None:
        del self.initialization, self.whole
        self.__class__ = DTensor  # type: ignore[assignment]
        # With hooks it is a leaf that autograd has seen already, and cannot be swapped.
        if isinstance(self, nn.Parameter) and not has_hooks(self):
            same = with_spec(local_tensor(self), spec_of(self))
            counting = share_version_counter(same).requires_grad_(self.requires_grad)
            vars(counting).update(vars(self))
            torch.utils.swap_tensors(self, counting)  # type: ignore[no-untyped-call]

    def _again(self, local: Tensor, whole: Deferred | None) -> UninitializedShard:
        result = UninitializedShard.of(local, self, self.initialization)
        # Such as the mark of an optimizer's parameter, and that it is a parameter.
        vars(result).update(vars(self))
        result.whole = whole
        return result

    def _with_memory(self, device: torch.device) -> UninitializedShard:
        self.initialization.check_device(device)
        local = torch.empty_like(local_tensor(self), device=device)
        mark_uninitialized(local)
        return self._again(local, deferred_like(self, self.initialization.record))


def _meta_shard(given: dict[int, UninitializedShard], tensor: Tensor) -> Tensor:
    """In place of a shard on the meta device an ordinary DTensor."""
    if not isinstance(tensor, UninitializedShard):
        return tensor
    ordinary = with_spec(local_tensor(tensor), spec_of(tensor))
    given[id(ordinary)] = tensor
    return ordinary


def _recorded(given: dict[int, UninitializedShard], tensor: Tensor) -> Tensor:
    """In place of a shard with memory the whole tensor that records; others on the CPU, where the
    record is replayed."""
    if isinstance(tensor, UninitializedShard):
        assert tensor.whole is not None
        given[id(tensor.whole)] = tensor
        return tensor.whole
    if isinstance(tensor, Deferred):
        return tensor
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def mark_uninitialized(tensor: Tensor) -> None:
    """Fills memory without values so that `is_uninitialized` knows it."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def is_uninitialized(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device or has memory in which no value was ever written."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if local.is_meta:
        return True
    if not local.numel():
        return False
    if local.is_floating_point() or local.is_complex():
        return bool(local.isnan().all())
    if local.dtype in (torch.int32, torch.int64):
        return bool((local == torch.iinfo(local.dtype).min).all())
    return False


class Initialization:
    """The initialization of a planned model whose parameters have no values yet."""

    def __init__(self, devices: Devices) -> None:
        self.record = Record()
        self.names: set[str] = set()
        """The parameters and buffers that were on the meta device."""
        self._devices = devices
        self._replayed_alone = False
        self._depth = 0

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """A context around the model's own initialization. When it ends and all parameters have
        been initialized, they get their values. Collective then."""
        shards = _shards(module)
        if not any(shard.whole is not None for shard in shards.values()):
            yield
            return
        self._depth += 1
        try:
            with recording(self.record):
                yield
        finally:
            self._depth -= 1
        if not self._depth and all(
            s.whole is not None and is_initialized(s.whole) for s in shards.values()
        ):
            self.take_values(module)

    def take_values(self, module: nn.Module, *, alone: bool = False) -> None:
        """Replays the record: each rank keeps its shards of one parameter after another.

        Random numbers are those of rank 0's generator.

        Args:
            alone: whether only this rank calls; it then draws from its own generator, which the
                next call together compares.

        Raises:
            PlanError: if the ranks have initialized differently.
            DeferredError: if the record cannot be replayed.
        """
        shards = _shards(module)
        wholes = {name: s.whole for name, s in shards.items() if s.whole is not None}
        if self._devices.is_distributed:
            if alone:
                self._replayed_alone = self._replayed_alone or bool(wholes)
            else:
                self._agree(wholes)
        wholes = {name: whole for name, whole in wholes.items() if is_initialized(whole)}

        def keep(name: str, value: Tensor) -> Tensor:
            shards[name].store(value)
            return value.new_empty(0)

        values_of(wholes, keep)
        for name in wholes:
            shards[name].become_ordinary()
        for child in module.modules():
            for name, buffer in own_buffers(child).items():
                if isinstance(buffer, Deferred):
                    own_buffers(child)[name] = value_of(buffer).to(self._devices.device)
        materialize_attributes(module)

    def _agree(self, wholes: dict[str, Deferred]) -> None:
        device = self._devices.device
        lines = list(init_record_lines(wholes.values()))
        alone = gathered(torch.tensor(self._replayed_alone, device=device))
        if alone.any():
            states: dict[str, Tensor] = {}
            share_generator_states(wholes.values(), states.update)
            lines += [
                f"{name} of the generator: {state.tolist()}" for name, state in states.items()
            ]
        check_description(lines, device)
        share_generator_states(
            wholes.values(), lambda states: take_values_of_rank_0(states, device)
        )

    def give_memory(self, module: nn.Module) -> None:
        """Gives parameters and buffers that are still on the meta device memory, and makes shards
        ordinary: to load values into. They stay the same objects."""
        device = self._devices.device
        for shard in _shards(module).values():
            if local_tensor(shard).is_meta:
                new = nn.Parameter(torch.empty_like(shard, device=device), shard.requires_grad)
                torch.utils.swap_tensors(shard, new)  # type: ignore[no-untyped-call]
            shard.take_value()
        for parameter in module.parameters():
            if parameter.is_meta:
                memory = torch.empty_like(parameter, device=device)
                mark_uninitialized(memory)
                new = nn.Parameter(memory, parameter.requires_grad)
                vars(new).update(vars(parameter))
                torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
        for child in module.modules():
            for name, buffer in own_buffers(child).items():
                if buffer is not None and buffer.is_meta:
                    own_buffers(child)[name] = torch.empty_like(buffer, device=device)
                    mark_uninitialized(own_buffers(child)[name])  # type: ignore[arg-type]

    def check_device(self, device: torch.device) -> None:
        planned = self._devices.device
        if device.type != planned.type:
            raise PlanError(
                f"memory of a planned model on {str(device)!r}, which computes on {str(planned)!r}"
                f"\nask for it there: `net.to_empty(device={str(planned)!r})`"
            )

    def of_copy(self) -> Initialization:
        """That of a copy of the module, whose shards are ordinary."""
        result = Initialization(self._devices)
        result.names = set(self.names)
        return result

    def end(self, module: nn.Module) -> None:
        """Makes shards ordinary that got their values by other means, as from a checkpoint."""
        for shard in _shards(module).values():
            shard.become_ordinary()

    def mark_memory(self, module: nn.Module) -> None:
        """After `to_empty`: marks the memory of buffers, and of parameters of one device."""
        tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
        for name in self.names:
            tensor = tensors.get(name)
            if tensor is not None and not tensor.is_meta and not isinstance(tensor, DTensor):
                mark_uninitialized(tensor)

    def check_has_values(self, module: nn.Module, used: set[str]) -> None:
        """Raises on all ranks alike. Collective.

        Args:
            used: names of the parameters and buffers that the program reads.

        Raises:
            PlanError: if one of them has no values.
        """
        tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
        lacking = [n for n, t in tensors.items() if n in self.names & used and is_uninitialized(t)]
        if self._devices.is_distributed:
            lacking = max(values_of_ranks(lacking), key=len)
        if not lacking:
            return
        more = len(lacking) - MOST_NAMES
        names = ", ".join(lacking[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        raise PlanError(
            f"no values in {names} of the {type(module).__name__}, which was built on the meta "
            "device\ninitialize it by `net.to_empty(device=...)` and its own `init_weights()` or "
            "`reset_parameters()`; or load it by `net.load_state_dict(state)`, `sw.load_checkpoint`"
        )


def initialization_of(module: nn.Module) -> Initialization | None:
    """What a planned module waits for; None if all its parameters had values."""
    execution = vars(module).get("execution")
    initialization: Initialization | None = getattr(execution, "initialization", None)
    return initialization


def give_memory(net: nn.Module) -> None:
    """Gives parameters of a planned module that are on the meta device memory to load into."""
    net = wrapped_model(net)
    initialization = initialization_of(net)
    if initialization is not None:
        initialization.give_memory(net)


def _shards(module: nn.Module) -> dict[str, UninitializedShard]:
    named = module.named_parameters()
    return {name: shard for name, shard in named if isinstance(shard, UninitializedShard)}

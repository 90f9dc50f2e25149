"""Parameters of a model that was planned on the meta device, until they are initialized.

`parallelize` creates meta shards for such models. `to_empty` allocates the shards of each rank;
from then on the model's own initialization is recorded on full tensors, as inside
`no_init_parameters`, and replayed shard by shard. The values therefore equal those of one device;
initializing shards directly would draw other random numbers, and could lose a write to one row.
Uninitialized memory is filled with NaN, to distinguish it from initialized memory.

With pipeline stages the model has placeholders of the tensors of other stages until it is
initialized, as the initialization writes to the tensors of all stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
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
    materialize_attributes,
    recording,
    share_generator_states,
    value_of,
    values_of,
)
from shardwright.core.parallel.module_wrapper import wrapped_model
from shardwright.core.parallel.uninitialized_tensors import (
    PendingInit,
    UninitializedShard,
    UninitializedTensor,
    is_uninitialized,
    mark_uninitialized,
)
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.modules import (
    forget_flat_weights,
    own_buffers,
    own_parameters,
    restore_flat_weights,
)
from shardwright.errors import PlanError

MAX_LISTED_NAMES = 5
"""Maximum number of parameter names in an error."""

OF_OTHER_STAGE = "of_other_stage"
"""Attribute that marks a removed placeholder of another stage's parameter: optimizers may still
refer to it."""

Placeholder = tuple[dict[str, Any], str, str]
"""(`_parameters` or `_buffers` of a submodule, key of a tensor in it, full name of the tensor)."""


class Initialization:
    """The pending initialization of a planned model with uninitialized parameters.

    Args:
        devices: this rank's view of the devices.
        names: full names of the parameters and buffers of all pipeline stages that were on the meta
            device when the model was planned.
    """

    def __init__(self, devices: Devices, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self.pending = PendingInit(Record(), devices.device)
        self._devices = devices
        # A deferred tensor by which functions on records find this record.
        self._recorded_tensor = deferred_like(torch.empty(0), self.pending.record)
        # Whether this rank has drawn numbers by itself, so that its generator may differ from the
        # others'.
        self._replayed_alone = False
        # Depth of nested initializers, such as an `init_weights` that calls `reset_parameters`.
        self._depth = 0
        self._placeholders: list[Placeholder] = []

    def add_placeholders(
        self, module: nn.Module, template: nn.Module, other_stage_tensors: Mapping[str, Tensor]
    ) -> None:
        """Register placeholders for the tensors of other pipeline stages, until `module` is
        initialized.

        Args:
            module: the planned model, whose tensors of other stages are None.
            template: the model with the tensors of all stages, on the meta device.
            other_stage_tensors: the user's tensors of other stages, by name; tied tensors by their
                first name.
        """
        planned: dict[str, Tensor] = dict(template.named_parameters())
        planned |= dict(template.named_buffers())
        # By id of the template's tensor, so that tied names share one placeholder.
        placeholders = {
            id(planned[name]): self._make_placeholder(original)
            for name, original in other_stage_tensors.items()
        }
        for path, child in template.named_modules():
            submodule = module.get_submodule(path)
            registries: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
                (own_parameters(submodule), own_parameters(child)),
                (own_buffers(submodule), own_buffers(child)),
            )
            for registry, planned_registry in registries:
                for leaf, tensor in planned_registry.items():
                    if id(tensor) in placeholders:
                        registry[leaf] = placeholders[id(tensor)]
                        full_name = f"{path}.{leaf}".removeprefix(".")
                        self._placeholders.append((registry, leaf, full_name))
        module.register_state_dict_post_hook(_remove_placeholders_from_state_dict)  # type: ignore[no-untyped-call]

    def _make_placeholder(self, original: Tensor) -> Tensor:
        if not isinstance(original, nn.Parameter):
            return original if original.is_meta else original.to(self.pending.device)
        placeholder = UninitializedTensor.of(original, self.pending)
        return nn.Parameter(placeholder, requires_grad=original.requires_grad)

    @property
    def placeholder_names(self) -> set[str]:
        """Full names of the module's placeholders; empty once the module is initialized."""
        return {name for _, _, name in self._placeholders}

    def _remove_placeholders(self) -> None:
        for registry, leaf, _ in self._placeholders:
            placeholder, registry[leaf] = registry[leaf], None
            if isinstance(placeholder, UninitializedTensor):
                # An optimizer may already refer to the placeholder.
                placeholder.set_value(torch.empty(0, device=self._devices.device))
                vars(placeholder)[OF_OTHER_STAGE] = True
        self._placeholders.clear()

    def memo_of_copy(self) -> dict[int, None]:
        """Return a memo for `copy.deepcopy` by which the copy has None in place of placeholders."""
        return {id(registry[leaf]): None for registry, leaf, _ in self._placeholders}

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Within the context, record the operators of the model's own initialization.

        At the end the record is replayed if it initializes all parameters, which is collective.
        """
        # Before `to_empty` there is nothing to record on.
        if not any(
            tensor.full is not None for tensor in _find_uninitialized_parameters(module).values()
        ):
            yield
            return
        self._depth += 1
        try:
            with recording(self.pending.record):
                yield
        finally:
            self._depth -= 1
        # The outermost initializer only: `init_weights` may call `reset_parameters`.
        if not self._depth and self._are_parameters_initialized(module):
            self.replay_record(module)

    def _are_parameters_initialized(self, module: nn.Module) -> bool:
        tensors = _find_uninitialized_parameters(module)
        return all(tensors[name].is_initialized() for name in tensors.keys() & self.names)

    def replay_record(self, module: nn.Module, *, only_this_rank: bool = False) -> None:
        """Replay the record one parameter at a time; each rank keeps its shards. Collective.

        Random numbers are drawn from the state of rank 0's generator.

        Args:
            module: the planned module.
            only_this_rank: whether only this rank makes the call, e.g. in `state_dict()`. Random
                numbers are then drawn from this rank's generator, and the next collective call
                checks that the generators of all ranks are equal.

        Raises:
            PlanError: if the ranks have recorded different initializations.
            DeferredError: if the record cannot be replayed.
        """
        tensors = _find_uninitialized_parameters(module)
        if self._devices.is_distributed:
            if only_this_rank:
                # Without recorded tensors a replay draws no numbers.
                self._replayed_alone |= any(t.full is not None for t in tensors.values())
            else:
                self._check_equal_records_of_ranks()
        # Placeholders are replayed for their random numbers, but not kept.
        elsewhere = self.placeholder_names
        full_tensors = {name: t.full for name, t in tensors.items() if t.is_initialized()}
        complete = self._are_parameters_initialized(module)

        def keep(name: str, value: Tensor) -> Tensor:
            tensor = tensors[name]
            if isinstance(tensor, UninitializedShard):
                tensor.store(value)
            elif name not in elsewhere:
                return value.to(self._devices.device, copy=True)
            # `values_of` keeps each result, but a shard has its part of the value already, and a
            # placeholder needs none.
            return value.new_empty(0)

        values = values_of(full_tensors, keep)  # type: ignore[arg-type]
        with _without_weak_references(module):
            for name, value in values.items():
                tensor = tensors[name]
                if isinstance(tensor, UninitializedShard):
                    tensor.make_ordinary()
                elif name not in elsewhere:
                    tensor.set_value(value)
            # Only then: a later initializer may still write to the tensors of other stages.
            if complete:
                self._remove_placeholders()
        # Buffers that the initialization has assigned are deferred; each rank computes them in
        # full.
        for child in module.modules():
            for name, buffer in own_buffers(child).items():
                if isinstance(buffer, Deferred):
                    own_buffers(child)[name] = value_of(buffer).to(self._devices.device)
        materialize_attributes(module)

    def _check_equal_records_of_ranks(self) -> None:
        device = self._devices.device
        lines = list(init_record_lines([self._recorded_tensor]))
        # A rank that replayed alone has drawn from its own generator, so the states must be equal.
        replayed_alone = gathered(torch.tensor(self._replayed_alone, device=device))
        if replayed_alone.any():
            states: dict[str, Tensor] = {}
            share_generator_states([self._recorded_tensor], states.update)
            lines += [
                f"{name} of the generator: {state.tolist()}" for name, state in states.items()
            ]
        # Before the states are shared, which would hide a difference of states.
        check_description(lines, device)
        share_generator_states(
            [self._recorded_tensor], lambda states: take_values_of_rank_0(states, device)
        )

    def allocate_memory(self, module: nn.Module) -> None:
        """Allocate parameters and buffers that are still on the meta device, before a checkpoint is
        loaded.

        Parameters stay the same objects, and become ordinary parameters.
        """
        device = self._devices.device
        with _without_weak_references(module):
            self._remove_placeholders()
            for tensor in _find_uninitialized_parameters(module).values():
                tensor.allocate_memory()
            for parameter in module.parameters():
                # On one device the parameters are ordinary tensors, which stay on the meta device
                # until here.
                if parameter.is_meta:
                    memory = torch.empty_like(parameter, device=device)
                    mark_uninitialized(memory)
                    new = nn.Parameter(memory, parameter.requires_grad)
                    # Attributes such as marks by which optimizers find their parameters.
                    vars(new).update(vars(parameter))
                    torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
        for child in module.modules():
            for name, buffer in own_buffers(child).items():
                if buffer is not None and buffer.is_meta:
                    own_buffers(child)[name] = torch.empty_like(buffer, device=device)
                    mark_uninitialized(own_buffers(child)[name])  # type: ignore[arg-type]

    def of_copy(self) -> Initialization:
        """Return the initialization of a copy of the module; the copy has ordinary shards."""
        return Initialization(self._devices, self.names)

    def end(self, module: nn.Module) -> None:
        """Make all remaining uninitialized parameters ordinary, and remove placeholders.

        Called once the values were loaded, or are not needed.
        """
        with _without_weak_references(module):
            self._remove_placeholders()
            for tensor in _find_uninitialized_parameters(module).values():
                tensor.make_ordinary()

    def mark_allocated_memory(self, module: nn.Module) -> None:
        """Mark buffers, and parameters that are not DTensors, as uninitialized after `to_empty`."""
        tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
        for name in self.names:
            tensor = tensors.get(name)
            if tensor is None or tensor.is_meta:
                continue
            # Shards are marked as they are allocated (`with_memory`), and placeholders have no
            # memory.
            if not isinstance(tensor, DTensor | UninitializedTensor):
                mark_uninitialized(tensor)

    def check_initialized(self, module: nn.Module, used: set[str]) -> None:
        """Check that all tensors that the program reads are initialized. Collective.

        Args:
            module: the planned module.
            used: names of the parameters and buffers that the program reads.

        Raises:
            PlanError: on all ranks, if a tensor is uninitialized on any rank.
        """
        tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
        uninitialized_names = [
            n for n, t in tensors.items() if n in self.names & used and _is_uninitialized(t)
        ]
        if self._devices.is_distributed:
            # The longest list of all ranks: another rank's shard may have no values.
            uninitialized_names = max(values_of_ranks(uninitialized_names), key=len)
        if not uninitialized_names:
            return
        more = len(uninitialized_names) - MAX_LISTED_NAMES
        names = ", ".join(uninitialized_names[:MAX_LISTED_NAMES]) + (
            f" and {more} more" if more > 0 else ""
        )
        raise PlanError(
            f"the {type(module).__name__} was built on the meta device, and these parameters or "
            f"buffers are uninitialized: {names}\ninitialize the model with "
            "`net.to_empty(device=...)` and its own `init_weights()` or `reset_parameters()`; or "
            "load it with `net.load_state_dict(state)` or `sw.load_checkpoint`"
        )


def initialization_of(module: nn.Module) -> Initialization | None:
    """Return the pending initialization of a planned model; None if all parameters are
    initialized."""
    execution = vars(module).get("execution")
    initialization: Initialization | None = getattr(execution, "initialization", None)
    return initialization


def is_of_other_stage(parameter: nn.Parameter) -> bool:
    """Whether a parameter was a placeholder for a parameter of another pipeline stage."""
    return OF_OTHER_STAGE in vars(parameter)


def allocate_memory(net: nn.Module) -> None:
    """Allocate the parameters and buffers of `net` that are on the meta device, before a checkpoint
    is loaded.

    Args:
        net: a planned module, or a wrapper of one; other modules are left unchanged.
    """
    net = wrapped_model(net)
    initialization = initialization_of(net)
    if initialization is not None:
        initialization.allocate_memory(net)


def tie_parameters_like(module: nn.Module, template: nn.Module) -> None:
    """Tie the parameters of `module` that are tied in `template`.

    `nn.Module.to_empty` replaces ordinary parameters one by one, which unties them.
    """
    # From the id of the template's tensor to the registry and name of its first use in `module`.
    first: dict[int, tuple[dict[str, Any], str]] = {}
    for path, planned in template.named_modules():
        registered = own_parameters(module.get_submodule(path))
        for leaf, tensor in own_parameters(planned).items():
            registry, first_leaf = first.setdefault(id(tensor), (registered, leaf))
            registered[leaf] = registry[first_leaf]


def _remove_placeholders_from_state_dict(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Post-hook of `state_dict` that removes placeholders of other pipeline stages' tensors."""
    initialization = initialization_of(module)
    if initialization is not None:
        for name in initialization.placeholder_names:
            state.pop(prefix + name, None)


def _is_uninitialized(tensor: Tensor) -> bool:
    # A shard without recorded values may still have values in its memory, which an
    # `UninitializedTensor` does not have.
    if isinstance(tensor, UninitializedTensor) or (
        isinstance(tensor, UninitializedShard) and tensor.is_initialized()
    ):
        return not tensor.is_initialized()
    return not isinstance(tensor, Deferred) and is_uninitialized(tensor)


@contextmanager
def _without_weak_references(module: nn.Module) -> Iterator[None]:
    """Context in which recurrent modules have no weak references to their parameters.

    `torch.utils.swap_tensors` raises an error for tensors with weak references.
    """
    recurrent = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    for child in recurrent:
        forget_flat_weights(child)
    try:
        yield
    finally:
        for child in recurrent:
            restore_flat_weights(child)


def _find_uninitialized_parameters(
    module: nn.Module,
) -> dict[str, UninitializedShard | UninitializedTensor]:
    return {
        name: tensor
        for name, tensor in module.named_parameters()
        if isinstance(tensor, UninitializedShard | UninitializedTensor)
    }

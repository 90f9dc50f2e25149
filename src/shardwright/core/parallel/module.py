"""The class of planned modules: the user's model, whose calls run the planned program."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.core.capture.fake_copy import caching_configs
from shardwright.core.deferred import Deferred
from shardwright.core.lower.program import Program
from shardwright.core.misuse.calls_of_parts import explain_calls_of_parts
from shardwright.core.misuse.gathered_copies import refuse_lost_writes
from shardwright.core.misuse.partial_state import refuse_to_save_shards
from shardwright.core.misuse.unsupported_operators import explain_unsupported_operators
from shardwright.core.parallel.execution import Execution
from shardwright.core.parallel.pipeline_execution import PipelineExecution
from shardwright.core.parallel.stored_tensors import (
    StoragePlan,
    copied_parameters,
    store_in_place,
    stored_copy,
)
from shardwright.core.parallel.template import template_of
from shardwright.core.parallel.uninitialized import Initialization, tie_like
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.hooks import hooks_of_modules, swap_forward_hooks
from shardwright.errors import PlanError

log = logging.getLogger(__name__)

INITIALIZERS = ("init_weights", "initialize_weights", "reset_parameters", "apply")
"""Methods by which models initialize themselves, in PyTorch, torchtitan and transformers."""

COMPILE = "`net.compile()` of a planned model compiles its programs"


class Copied:
    """Copies planned models; refuses to pickle them, as they are bound to process groups."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the planned model, with parameters of its own in equal shards. Not collective."""
        assert isinstance(self, ParallelModule)
        if self.execution.initialization is not None:
            self.execution.initialization.take_values(self, alone=True)
            memo |= self.execution.initialization.memo_of_copy()
        memo |= copied_parameters(self, memo)
        kind, execution = type(self), vars(self).pop("execution")
        object.__setattr__(self, "__class__", kind.__bases__[-1])
        try:
            result = deepcopy(self, memo)
        finally:
            object.__setattr__(self, "__class__", kind)
            vars(self)["execution"] = execution
        vars(result)["execution"] = execution.of_copy(result, memo)
        object.__setattr__(result, "__class__", kind)
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PlanError(
            f"a {type(self).__name__} that is planned cannot be pickled, as it is bound to this "
            "process\nsave its parameters by `sw.save_state_dict(net, path)` or a checkpoint, and "
            "load them into another model; `copy.deepcopy` copies it"
        )


class ParallelModule(Copied, nn.Module):
    """A model that is sharded over the devices of the running process group.

    Its class is derived from this one and from the user's. It has the methods, attributes,
    parameters, buffers and names of the user's model; on several devices its parameters are
    DTensors. Parameters that only other pipeline stages read are None.

    Called with the whole batch on every rank, it returns what the model returns: scalars
    replicated; other tensors replicated if there is no loss, else as DTensors that are gathered
    only on request (`full_tensor()`) or with ordinary tensors (`OutputTensor`). Gradients may start
    from any output, in its layout, and must be equal on all ranks. Where each rank passes its own
    part of the batch, outputs are those of the whole batch, and refuse labels of a part
    (`WholeBatchTensor`). With pipeline stages it is called under `torch.no_grad()`, and trained by
    `train_step`.
    """

    execution: Execution
    """Runs the calls on this rank."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of this rank for the mode and shapes of the plan; `print` shows the code."""
        return self.execution.programs

    @property
    def program(self) -> Program:
        """The first of `programs`; the only one without pipeline stages."""
        return self.programs[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.execution.forward(args, kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over all micro-batches, and accumulate gradients.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            PlanError: if the model returns no loss or several, a call has other arguments than
                planned, or the batch cannot be divided as planned.
        """
        return self.execution.train_step(args, kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the norm of all gradients, over all devices and stages, to `max_norm`.

        Returns:
            The norm before clipping, on every rank.
        """
        return self.execution.clip_grad_norm_(max_norm)

    def to_empty(self, *, device: Any, recurse: bool = True) -> ParallelModule:
        """Give parameters and buffers on the meta device memory, each rank that of its shards.

        Initialize them afterwards by the model's own `init_weights` or `reset_parameters`.
        """
        super().to_empty(device=device, recurse=recurse)
        if self.execution.initialization is not None:
            self.execution.initialization.mark_memory(self)
            tie_like(self, self.execution.template)
        return self

    def compile(self, *args: Any, regional: bool = False, **kwargs: Any) -> None:
        """Compile the programs with `torch.compile`, in place. Takes its arguments.

        Redistributions are part of the compiled graph.

        Args:
            regional: whether only the repeated blocks of a program are compiled, once.
        """
        self.execution.compile(args, kwargs, regional)


_OWN_NAMES = {"execution", "compile"} | {
    name
    for name in vars(ParallelModule).keys() - vars(nn.Module).keys()
    if not name.startswith(
        "__annot"
    )  # What classes have of those depends on the version of Python.
}


def parallel_module(
    module: nn.Module,
    partitioned: Partitioned,
    devices: Devices,
    *,
    copy: bool = False,
    release: bool = False,
) -> ParallelModule:
    """Splits `module` as planned over `devices`.

    Args:
        copy: whether a copy is split, and `module` stays as it is.
        release: whether the given parameters give up their memory.

    Returns:
        `module`, whose class is now derived from its own and from `ParallelModule`; or the copy.

    Raises:
        PlanError: if the model has an attribute or a method with the name of one of
            `ParallelModule`.
    """
    _check_names(module)
    if caching_configs(module):
        log.info("%s is captured with config.use_cache=False", type(module).__name__)
    left_out = _of_other_stages(module, partitioned, devices)
    initialization = Initialization(devices, _without_values(module, devices))
    refuse_lost_writes()
    explain_unsupported_operators()
    refuse_to_save_shards()
    # Handles of hooks remove them from the dictionaries that they were registered in.
    template, original, hooks = template_of(module), module.forward, hooks_of_modules(module)
    storage = StoragePlan(partitioned.decisions.storage, devices, initialization, left_out, release)
    if copy:
        stored = stored_copy(module, storage)
    else:
        store_in_place(module, storage)
        stored = module
    make = Execution if partitioned.pipeline.stages == 1 else PipelineExecution
    execution = make(stored, template, partitioned, devices, hooks)
    execution.initialization = initialization if initialization.names else None
    # The program contains the forward hooks and a `forward` that was set on the instance.
    swap_forward_hooks(stored, execution.inside)
    if "forward" in vars(stored):
        vars(execution.inside)["forward"] = vars(stored).pop("forward")
    vars(stored)["execution"] = execution
    if initialization.names and left_out:
        initialization.add_placeholders(stored, template, left_out)
    object.__setattr__(stored, "__class__", _parallel_class(stored, original))
    assert isinstance(stored, ParallelModule)
    if devices.mesh is not None:
        explain_calls_of_parts(stored)
    return stored


def _parallel_class(module: nn.Module, original: Callable[..., Any]) -> type[ParallelModule]:
    """Derive the class of a planned model from the user's.

    It has the name of the user's class, by which libraries look models up, and the signature of its
    `forward`.
    """
    own = type(module)

    @functools.wraps(original)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return self.execution.forward(args, kwargs)

    # It refers to the original model, and would keep its parameters alive.
    del forward.__wrapped__
    signature = inspect.signature(original)
    bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [bound, *signature.parameters.values()]
    forward.__dict__["__signature__"] = signature.replace(parameters=parameters)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    calls = {"forward": forward, "__call__": _excluded_from_compile(own.__call__)}
    for name in INITIALIZERS:
        if callable(getattr(own, name, None)):
            calls[name] = _recorded_initializer(getattr(own, name))
    return type(own.__name__, (ParallelModule, own), {**names, **calls})


def _recorded_initializer(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """A method that initializes the model, on whole tensors where it has no values yet."""

    @functools.wraps(initialize)
    def initializer(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        initialization = self.execution.initialization
        if initialization is None:
            return initialize(self, *args, **kwargs)
        with initialization.recorded(self):
            return initialize(self, *args, **kwargs)

    return initializer


def _excluded_from_compile(call: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude `call` from `torch.compile`, and warn once."""
    said = False

    def uncompiled(is_compiled: bool, *args: Any, **kwargs: Any) -> Any:
        nonlocal said
        if is_compiled and not said:
            said = True
            log.warning("torch.compile leaves a planned model as it is: %s", COMPILE)
        return call(*args, **kwargs)

    disable: Any = torch.compiler.disable
    disabled = disable(uncompiled, reason=COMPILE)

    def called(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return disabled(torch.compiler.is_compiling(), self, *args, **kwargs)

    return called


def _check_names(module: nn.Module) -> None:
    for name in sorted(_OWN_NAMES):
        of_class = getattr(type(module), name, None) is not getattr(nn.Module, name, None)
        if name in vars(module) or of_class:
            raise PlanError(
                f"{type(module).__name__} has an attribute {name!r}, a name that planned models "
                "use themselves\nrename it"
            )


def _without_values(module: nn.Module, devices: Devices) -> set[str]:
    """Names of the parameters and buffers on the meta device that nothing initializes yet."""
    if devices.device.type == "meta":
        return set()
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name for name, t in tensors if t.is_meta and not isinstance(t, Deferred)}


def _of_other_stages(
    module: nn.Module, partitioned: Partitioned, devices: Devices
) -> dict[str, Tensor]:
    """The parameters and buffers that only other pipeline stages own, by name."""
    if partitioned.pipeline.stages == 1:
        return {}
    graph = partitioned.graph
    of_stage = {v.name for values in partitioned.tensors_of(devices.stage) for v in values}
    used = {v.name for v in (*graph.parameters, *graph.module_buffers)}
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    # Tensors that no operator reads belong to the first stage.
    return {n: t for n, t in tensors.items() if n not in of_stage and (n in used or devices.stage)}

"""The module that `parallelize` returns: the user's model, whose calls the planned program runs."""

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
from shardwright.core.parallel.uninitialized import Initialization
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.hooks import hooks_of_modules, swap_forward_hooks
from shardwright.errors import PlanError

log = logging.getLogger(__name__)

INITIALIZERS = ("init_weights", "initialize_weights", "reset_parameters", "apply")
"""Methods by which models initialize themselves, in PyTorch, torchtitan and transformers."""

COMPILE = "`net.compile()` of a planned model compiles its programs"


class Copied:
    """How a planned model is copied. It is not pickled, as it is bound to the process groups of
    this process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A planned model with parameters of its own, cut alike. It communicates nothing."""
        assert isinstance(self, ParallelModule)
        if self.execution.initialization is not None:
            self.execution.initialization.take_values(self, alone=True)
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
            "process: save its parameters by `sw.save_state_dict(net, path)` or a checkpoint, and "
            "load them into another model; `copy.deepcopy` copies it"
        )


class ParallelModule(Copied, nn.Module):
    """A model split over the devices of the running process group.

    It is an instance of a class that is derived from this one and from the user's, and has the
    methods, attributes, parameters, buffers and names of the model that it was made from; on more
    than one device its parameters are DTensors. Those that only other pipeline stages read are
    None.

    Called with the whole batch on every rank, it returns what the model returns: numbers
    replicated; other tensors replicated if there is no loss, else as DTensors, which communicate
    only when they are asked to (`full_tensor()`) or meet ordinary tensors (`OutputTensor`). Each
    takes its gradient as it was handed out, so any of them can be trained, together or apart, by
    what is computed from them: the same on all ranks. Where each rank gives its own part of the
    batch, outputs are of the whole batch, and refuse labels of a part (`WholeBatchTensor`). With
    pipeline stages it is called under `torch.no_grad()`, and trained by `train_step`.
    """

    execution: Execution
    """What runs its calls on this rank."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """What this rank runs in the mode and for the shapes of the plan; `print` shows them."""
        return self.execution.programs

    @property
    def program(self) -> Program:
        """The first of `programs`, and without pipeline stages the only one."""
        return self.programs[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.execution.forward(args, kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward over all micro-batches; gradients are added to the parameters'.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            PlanError: if the model returns no loss or several, a call has other arguments than
                planned, or the batch cannot be divided as planned.
        """
        return self.execution.train_step(args, kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over all devices and stages is at most
        `max_norm`.

        Returns:
            The norm before, on every rank.
        """
        return self.execution.clip_grad_norm_(max_norm)

    def to_empty(self, *, device: Any, recurse: bool = True) -> ParallelModule:
        """Give parameters and buffers on the meta device memory, each rank that of its shards.

        Initialize them afterwards by the model's own `init_weights` or `reset_parameters`.
        """
        super().to_empty(device=device, recurse=recurse)
        if self.execution.initialization is not None:
            self.execution.initialization.mark_memory(self)
        return self

    def compile(self, *args: Any, regional: bool = False, **kwargs: Any) -> None:
        """Compiles the programs with `torch.compile`, in place; takes its arguments.
        Redistributions are part of the compiled graph.

        Args:
            regional: whether only the equal blocks of a program are compiled, as one function.
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
        PlanError: if the model has an attribute or a method with the name of one of ours.
    """
    _check_names(module)
    if caching_configs(module):
        log.info("%s is captured with config.use_cache=False", type(module).__name__)
    left_out = _of_other_stages(module, partitioned, devices)
    refuse_lost_writes()
    explain_unsupported_operators()
    refuse_to_save_shards()
    # Handles of hooks remove them from the dictionaries that they were registered in.
    template, original, hooks = template_of(module), module.forward, hooks_of_modules(module)
    initialization = Initialization(devices)
    storage = StoragePlan(partitioned.decisions.storage, devices, initialization, left_out, release)
    if copy:
        stored = stored_copy(module, storage)
    else:
        store_in_place(module, storage)
        stored = module
    make = Execution if partitioned.pipeline.stages == 1 else PipelineExecution
    execution = make(stored, template, partitioned, devices, hooks)
    execution.initialization = initialization if initialization.names else None
    # The program has its forward hooks, and what was set as its `forward`, inside.
    swap_forward_hooks(stored, execution.inside)
    if "forward" in vars(stored):
        vars(execution.inside)["forward"] = vars(stored).pop("forward")
    vars(stored)["execution"] = execution
    object.__setattr__(stored, "__class__", _parallel_class(stored, original))
    assert isinstance(stored, ParallelModule)
    if devices.mesh is not None:
        explain_calls_of_parts(stored)
    return stored


def _parallel_class(module: nn.Module, original: Callable[..., Any]) -> type[ParallelModule]:
    """Has the name of the model's own class, by which libraries look a model up, and the signature
    of its `forward`."""
    own = type(module)

    @functools.wraps(original)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return self.execution.forward(args, kwargs)

    # It would hold the original model with its parameters.
    del forward.__wrapped__
    signature = inspect.signature(original)
    bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [bound, *signature.parameters.values()]
    forward.__dict__["__signature__"] = signature.replace(parameters=parameters)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    calls = {"forward": forward, "__call__": _left_by_compilers(own.__call__)}
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


def _left_by_compilers(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which `torch.compile` leaves as it is: it says so once."""
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
                f"{type(module).__name__} has an attribute {name!r}, which is the name of one of "
                "those that a planned model gets: rename it"
            )


def _of_other_stages(module: nn.Module, partitioned: Partitioned, devices: Devices) -> set[str]:
    """Names of the parameters and buffers that this rank's stage does not hold."""
    if partitioned.pipeline.stages == 1:
        return set()
    graph = partitioned.graph
    of_stage = {v.name for values in partitioned.tensors_of(devices.stage) for v in values}
    used = {v.name for v in (*graph.parameters, *graph.buffers)}
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    # What no operator reads lies in the first stage.
    return {n for n in names if n not in of_stage and (n in used or devices.stage)}

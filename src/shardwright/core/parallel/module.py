"""The class of planned modules: the user's model, whose calls run the planned program.

As in FSDP2's `fully_shard`, a module is changed in place by giving the instance a class derived
from its own.
"""

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
from shardwright.core.misuse.stage_parameters import methods_that_refuse_pairs
from shardwright.core.misuse.unsupported_operators import compute_unsupported_operators
from shardwright.core.parallel.execution import Execution
from shardwright.core.parallel.pipeline_execution import PipelineExecution
from shardwright.core.parallel.stages_of_tensors import (
    explain_tensors_of_other_stages,
    stages_of_tensors,
)
from shardwright.core.parallel.stored_tensors import (
    StoragePlan,
    copied_parameters,
    store_in_place,
    stored_copy,
)
from shardwright.core.parallel.template import template_of
from shardwright.core.parallel.uninitialized import Initialization, tie_parameters_like
from shardwright.core.parallel.wrappers import refuse_wrappers
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.counted_calls import model_call
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.total_norms import extend_total_norms
from shardwright.core.torch_internals.hooks import hooks_of_modules, swap_forward_hooks
from shardwright.core.torch_internals.modules import forget_compilation
from shardwright.errors import CaptureError, MixedTensorsError, PlanError

log = logging.getLogger(__name__)

INITIALIZERS = ("init_weights", "initialize_weights", "reset_parameters", "apply")
"""Names of methods that initialize parameters in PyTorch, torchtitan and transformers."""

DECODERS = ("generate",)
"""Names of methods of transformers' models that call the model many times, with caches."""

COMPILE_REMEDY = "call `net.compile()`, which compiles the programs of a planned model"


class Copyable:
    """Mixin that deep-copies planned models, and rejects pickling, since a planned model refers to
    process groups of this process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the model with its shards; the copy runs the same programs. Not collective."""
        assert isinstance(self, ParallelModule)
        if self.execution.initialization is not None:
            self.execution.initialization.replay_record(self, only_this_rank=True)
            # The copy has None in place of other stages' tensors.
            memo |= self.execution.initialization.memo_of_copy()
        # A parameter shares the version counter of its local shard, which `deepcopy` would lose.
        memo |= copied_parameters(self, memo)
        # As an instance of the user's class, since this method would call itself, and without the
        # execution, which refers to process groups.
        parallel_class, execution = type(self), vars(self).pop("execution")
        object.__setattr__(self, "__class__", user_class_of(parallel_class))
        try:
            result = deepcopy(self, memo)
        finally:
            object.__setattr__(self, "__class__", parallel_class)
            vars(self)["execution"] = execution
        vars(result)["execution"] = execution.for_copy(result, memo)
        object.__setattr__(result, "__class__", parallel_class)
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PlanError(
            f"a planned {type(self).__name__} cannot be pickled, as it is bound to this process's "
            "groups\n"
            "save its parameters with `sw.save_state_dict(net, path)` or `sw.save_checkpoint`, save"
            " the model inside `with sw.whole(net):`, or copy it with `copy.deepcopy(net)`"
        )


class ParallelModule(Copyable, nn.Module):
    """A model that is sharded over the devices of the running process group.

    The class of a planned model is derived from this class and from the user's. The model has the
    methods, attributes, parameters, buffers and names of the user's model; on several devices its
    parameters are DTensors. Parameters that only other pipeline stages read cannot be used.

    Called with the global batch on every rank, the model returns the results of the user's model.
    Scalars are replicated. Other tensors are replicated if the model returns no loss; otherwise
    they are DTensors, gathered on request (`full_tensor()`) or by operators with ordinary tensors
    (`OutputTensor`).
    A backward pass may start from any output, with gradients in the output's layout that are equal
    on all ranks. If ranks pass local batches (`dataset_strategy`), an output with samples has the
    samples of the local batch, and its gradient is that of the rank's own loss. With pipeline
    stages the model is called under `torch.no_grad()`, and trained by `train_step`.
    """

    execution: Execution
    """Executor of the model's calls on this rank."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of this rank for the mode and shapes of the plan; `print` shows the code."""
        return self.execution.programs

    @property
    def program(self) -> Program:
        """The first program of this rank; without pipeline stages, the only one."""
        return self.programs[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode = "training" if self.training else "evaluation"
        with model_call(f"{mode} forward pass", self.execution.devices):
            return self.execution.forward(args, kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over all micro-batches, and accumulate gradients.

        Returns:
            The loss of the global batch, on every rank.

        Raises:
            PlanError: if gradients are disabled, the model returns no loss or several, an argument
                does not match the plan, or the batch cannot be split as planned.
        """
        with model_call("train_step", self.execution.devices):
            return self.execution.train_step(args, kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm, over all devices and stages, to `max_norm`.

        Returns:
            The norm before clipping, on every rank.
        """
        with model_call("clip_grad_norm_", self.execution.devices):
            return self.execution.clip_grad_norm_(max_norm)

    def to_empty(self, *, device: Any, recurse: bool = True) -> ParallelModule:
        """Allocate parameters and buffers that are on the meta device; each rank allocates shards.

        Initialize them afterwards with the model's own `init_weights` or `reset_parameters`.

        Args:
            device: a device of the type on which the model was planned.
            recurse: whether to allocate the tensors of submodules too.

        Raises:
            PlanError: if `device` is of another type.
        """
        super().to_empty(device=device, recurse=recurse)
        # The new memory has arbitrary values, so it is marked; `to_empty` also unties tied
        # parameters.
        if self.execution.initialization is not None:
            self.execution.initialization.mark_allocated_memory(self)
            tie_parameters_like(self, self.execution.template)
        return self

    def compile(self, *args: Any, regional: bool = False, **kwargs: Any) -> None:
        """Compile the programs, including their collectives, with `torch.compile`, in place.

        Args:
            args, kwargs: arguments of `torch.compile`.
            regional: whether to compile only the repeated blocks of a program, each once.
        """
        self.execution.compile(args, kwargs, regional)


_RESERVED_NAMES = {"execution", "compile"} | {
    name
    for name in vars(ParallelModule).keys() - vars(nn.Module).keys()
    # The names under which a class keeps its annotations depend on the version of Python.
    if not name.startswith("__annot")
}


def parallel_module(
    module: nn.Module,
    partitioned: Partitioned,
    devices: Devices,
    *,
    copy: bool = False,
    release: bool = False,
) -> ParallelModule:
    """Shard `module` over `devices` as planned.

    Args:
        module: the user's model.
        partitioned: the partitioned graph of the model.
        devices: this rank's view of the devices.
        copy: whether to shard a copy and leave `module` unchanged.
        release: whether to free the memory of the parameters of `module`.

    Returns:
        `module` or its copy, as an instance of a class derived from its own and `ParallelModule`.

    Raises:
        PlanError: if the model defines a name that `ParallelModule` defines.
    """
    _check_reserved_names(module)
    if caching_configs(module):
        log.info("%s is captured with config.use_cache=False", type(module).__name__)
    other_stages = _find_other_stage_tensors(module, partitioned, devices)
    initialization = Initialization(devices, _find_uninitialized_names(module, devices))
    refuse_lost_writes()
    # These change functions for the DTensors of this process; further calls do nothing.
    compute_unsupported_operators()
    refuse_to_save_shards()
    extend_total_norms()
    refuse_wrappers()
    # Before the parameters are replaced. The hooks are taken as the dictionaries in which they were
    # registered, from which `RemovableHandle.remove()` deletes them.
    template, user_forward, hooks = template_of(module), module.forward, hooks_of_modules(module)
    storage = StoragePlan(
        partitioned.decisions.storage, devices, initialization, other_stages, release
    )
    if copy:
        stored = stored_copy(module, storage)
    else:
        store_in_place(module, storage)
        stored = module
    execution_class = Execution if partitioned.pipeline.stages == 1 else PipelineExecution
    execution = execution_class(stored, template, partitioned, devices, hooks)
    execution.initialization = initialization if initialization.names else None
    # The program contains the captured hooks; running them on its results would apply them twice.
    if partitioned.graph.python is None:
        swap_forward_hooks(stored, execution.captured_hooks)
    if "forward" in vars(stored):
        # On the instance it would hide the `forward` of the derived class; `whole` puts it back.
        vars(execution.captured_hooks)["forward"] = vars(stored).pop("forward")
    vars(stored)["execution"] = execution
    if initialization.names and other_stages:
        initialization.add_placeholders(stored, template, other_stages)
    # Dynamo would trace the guards and caches of `Execution`.
    if forget_compilation(stored):
        log.warning(
            "%s was compiled before it was planned, which has no effect\n%s",
            type(module).__name__,
            COMPILE_REMEDY,
        )
    _set_planned_class(stored, execution, user_forward, partitioned.pipeline.stages > 1)
    assert isinstance(stored, ParallelModule)
    # Guards on the user's Python would see the `forward` that this sets on submodules.
    if devices.mesh is not None and partitioned.graph.python is None:
        explain_calls_of_parts(stored)
    if other_stages and partitioned.graph.python is None and not initialization.names:
        explain_tensors_of_other_stages(stored, template)
    return stored


def _set_planned_class(
    module: nn.Module, execution: Execution, user_forward: Callable[..., Any], is_staged: bool
) -> None:
    """Give a planned model a class that is derived from its own and from `ParallelModule`."""
    # Python accepts a class with the same memory layout only, which follows the first base. That of
    # `ParallelModule` differs if the user's class has a base with `__slots__` before `nn.Module`,
    # such as `abc.ABC` or `typing.Generic`.
    for is_user_class_first in (False, True):
        parallel_class = _derive_planned_class(module, user_forward, is_staged, is_user_class_first)
        execution.class_names = frozenset(vars(parallel_class))
        try:
            # Not by assignment, which a `__setattr__` of the model may intercept.
            object.__setattr__(module, "__class__", parallel_class)
            return
        except TypeError:
            if is_user_class_first:
                raise


def _derive_planned_class(
    module: nn.Module,
    user_forward: Callable[..., Any],
    is_staged: bool,
    is_user_class_first: bool = False,
) -> type[ParallelModule]:
    """Derive the class of a planned model, with or without pipeline stages, from the user's class.

    The derived class has the name of the user's class, by which libraries look up models, and the
    signature of the user's `forward`, by which transformers' `Trainer` selects the columns of a
    data set.
    """
    user_class = type(module)

    @functools.wraps(user_forward)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    # `functools.wraps` refers to the bound method, which would keep the full parameters alive.
    del forward.__wrapped__
    # The signature of a bound method lacks `self`, which a function of a class has.
    signature = inspect.signature(user_forward)
    bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [bound, *signature.parameters.values()]
    forward.__dict__["__signature__"] = signature.replace(parameters=parameters)
    names = {
        "__module__": user_class.__module__,
        "__qualname__": user_class.__qualname__,
        "__doc__": user_class.__doc__,
    }
    # `__call__` too, at which Dynamo begins to trace a module.
    calls = {"forward": forward, "__call__": _exclude_from_compile(user_class.__call__)}
    for name in INITIALIZERS:
        if callable(getattr(user_class, name, None)):
            calls[name] = _wrap_initializer(getattr(user_class, name))
    for name in DECODERS:
        if callable(getattr(user_class, name, None)):
            calls[name] = _wrap_decoder_errors(name, getattr(user_class, name))
    if is_staged:
        calls |= methods_that_refuse_pairs(user_class)
    namespace = {**names, **calls}
    if not is_user_class_first:
        return type(user_class.__name__, (ParallelModule, user_class), namespace)
    # Members of the first base come before those of `ParallelModule`, unless the class has them.
    of_planned = vars(Copyable) | vars(ParallelModule)
    inherited = {n: m for n, m in of_planned.items() if n not in _OF_EVERY_CLASS}
    bases = (user_class, ParallelModule)
    return type(user_class.__name__, bases, {**inherited, **namespace})


_OF_EVERY_CLASS = frozenset(vars(type("", (), {}))) | {"__annotations__", "__parameters__"}


def user_class_of(parallel_class: type[ParallelModule]) -> type[nn.Module]:
    """Return the user's class, from which the class of a planned model is derived."""
    return next(base for base in parallel_class.__bases__ if base is not ParallelModule)


def _wrap_initializer(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `initialize`, a method that initializes the model, so that it sets local shards.

    While parameters are uninitialized, operators of `initialize` are recorded on full tensors and
    replayed shard by shard, so that values equal those of one device.
    """

    @functools.wraps(initialize)
    def initializer(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        initialization = self.execution.initialization
        if initialization is None:
            return initialize(self, *args, **kwargs)
        with initialization.recorded(self):
            return initialize(self, *args, **kwargs)

    return initializer


def _wrap_decoder_errors(name: str, decode: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `decode`, a method such as `generate`, so that its errors suggest `sw.whole`.

    The method may call the model with caches, which plans do not support.
    """

    @functools.wraps(decode)
    def decoder(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        try:
            return decode(self, *args, **kwargs)
        except (CaptureError, MixedTensorsError) as error:
            # Without the second line of the error, the remedy for a call of the model itself.
            reason = str(error).partition("\n")[0]
            raise PlanError(
                f"`{name}` calls the planned {type(self).__name__} in a way that cannot be planned:"
                f" {reason}\ncall `{name}` on every rank with full parameters: "
                f"`with sw.whole(net): net.{name}(...)`"
            ) from error

    return decoder


def _exclude_from_compile(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` so that `torch.compile` does not trace it; the first call inside a compiled
    function warns.

    Dynamo would trace the guards and caches of `Execution`; `net.compile()` compiles the programs.
    """
    warned = False

    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        if not warned:
            warned = True
            log.warning("torch.compile does not compile a planned model\n%s", COMPILE_REMEDY)
        return call(*args, **kwargs)

    # `torch.compiler.disable` is not typed.
    disable: Any = torch.compiler.disable
    disabled = disable(uncompiled, reason=COMPILE_REMEDY)

    def called(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        # A disabled function asks whether the process runs `torch.export`: another thread may.
        if torch.compiler.is_dynamo_compiling():
            return disabled(self, *args, **kwargs)
        return call(self, *args, **kwargs)

    return called


def refuse_training(*_: Any, **__: Any) -> NoReturn:
    """Take the place of methods, and hooks of parameters, inside `sw.whole`."""
    raise PlanError(
        "a model cannot be trained inside `sw.whole`, where its parameters are copies that no "
        "optimizer updates\ntrain the model outside `sw.whole`"
    )


def _check_reserved_names(module: nn.Module) -> None:
    for name in sorted(_RESERVED_NAMES):
        # `compile` and `to_empty` exist in every module: only overrides are refused.
        is_overridden = getattr(type(module), name, None) is not getattr(nn.Module, name, None)
        if name in vars(module) or is_overridden:
            raise PlanError(
                f"{type(module).__name__} has an attribute {name!r}, a name that planned models "
                f"define\nrename the attribute, for instance to {name + '_'!r}"
            )


def _find_uninitialized_names(module: nn.Module, devices: Devices) -> set[str]:
    """Return the names of parameters and buffers on the meta device without a recorded
    initialization."""
    # A model on the meta device, as in a rehearsal, never gets values.
    if devices.device.type == "meta":
        return set()
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name for name, t in tensors if t.is_meta and not isinstance(t, Deferred)}


def _find_other_stage_tensors(
    module: nn.Module, partitioned: Partitioned, devices: Devices
) -> dict[str, Tensor]:
    """Return the parameters and buffers that this rank's pipeline stage does not own, by name."""
    if partitioned.pipeline.stages == 1:
        return {}
    stages = stages_of_tensors(module, partitioned)
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: t for name, t in tensors.items() if devices.stage not in stages[name]}

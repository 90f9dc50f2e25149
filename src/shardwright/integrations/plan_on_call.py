"""Plan a model when a framework's training loop calls it for the first time.

Frameworks set up models and optimizers before the first batch, whose shapes a plan needs. Until its
first call the model has a temporary subclass of its class, whose `__call__` plans and shards it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.core.api.not_distributed import check_not_distributed
from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.plan import plan as plan_model
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError
from shardwright.integrations.rank_data import DataShards

USER_CLASS = "class_before_planning"
"""Attribute with the user's class, in the temporary class of a model before its first call."""

STEP_IN_CALL = "runs_a_training_step"
"""Attribute that marks a `forward` replaced by `train_stages_in_calls`."""

HALF = (torch.float16, torch.bfloat16)

log = logging.getLogger("shardwright")


def read_plan(plan: Plan | str | Path | None, options: Mapping[str, Any]) -> Plan | None:
    """Return the plan that a user passed to a framework, read from its file if given by path.

    Raises:
        PlanError: if `plan` is not a plan, a path or None, or options of `sw.plan` are passed too.
    """
    if plan is None:
        return None
    if options:
        raise PlanError(
            f"plan=... conflicts with {', '.join(f'{name}=...' for name in options)}: options have"
            " no effect on a finished plan\npass either a plan or options of `sw.plan`"
        )
    plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan={plan!r} is not a plan\npass the result of `sw.plan(net, batch, devices=8)`, the"
            " path of a plan file, or None to plan with the first batch"
        )
    return plan


def plan_on_first_call(
    module: nn.Module,
    options: Mapping[str, Any],
    device: torch.device,
    on_planned: Callable[[ParallelModule], None],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Make the first call of `module` plan it for the shapes of that call and shard it in place.

    Args:
        module: the model, not yet planned.
        options: options of `sw.plan`; `devices` defaults to the number of ranks.
        device: the device of this rank.
        on_planned: called with the sharded model before its first forward pass.
        context: returns the context in which the model is planned, such as autocast.

    Raises:
        PlanError: if `module` is already planned, or wrapped or sharded by another library.
    """
    check_not_distributed(module)
    user_class = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # First, because the capture calls the module itself.
        set_class(self, user_class)
        if any(isinstance(submodule, ParallelModule) for submodule in self.modules()):
            # A submodule was called before, by itself, and is planned by itself.
            return self(*args, **kwargs)
        unplanned_submodules = [
            submodule for submodule in self.modules() if USER_CLASS in vars(type(submodule))
        ]
        unplanned_classes = [type(submodule) for submodule in unplanned_submodules]
        # The capture calls submodules, whose `__call__` must not plan them by themselves.
        for submodule in unplanned_submodules:
            set_class(submodule, vars(type(submodule))[USER_CLASS])
        try:
            # A loop may evaluate first, without gradients.
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                _in_training_mode(self),
                context(),
            ):
                # Options may name another number of devices.
                arguments = {"devices": _get_world_size(), **options}
                plan = plan_model(self, *_with_global_shapes((args, kwargs), options), **arguments)
                log.info("planned %s:\n%s", user_class.__name__, plan)
                parallel = parallelize(self, plan, device)
        # Also after Ctrl-C: the next call then plans again.
        except BaseException:
            for submodule, unplanned_class in zip(
                unplanned_submodules, unplanned_classes, strict=True
            ):
                set_class(submodule, unplanned_class)
            set_class(self, unplanned)
            raise
        assert isinstance(parallel, ParallelModule)
        on_planned(parallel)
        return self(*args, **kwargs)

    names = {"__module__": user_class.__module__, "__qualname__": user_class.__qualname__}
    attributes = {**names, "__call__": call, USER_CLASS: user_class}
    unplanned = type(user_class.__name__, (user_class,), attributes)
    set_class(module, unplanned)


def _with_global_shapes(call: Any, options: Mapping[str, Any]) -> Any:
    """Replace the tensors of a local batch in a call by meta tensors of the global batch."""
    shards = DataShards.of_options(options)
    if shards.count == 1:
        return call
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor) and leaf.ndim]
    # As `dataset_strategy` recognizes them; other tensors, such as positions, are not sharded.
    batch_size = tensors[0].shape[0] if tensors else 0

    def enlarge(leaf: Any) -> Any:
        if not any(leaf is tensor for tensor in tensors) or leaf.shape[0] != batch_size:
            return leaf
        shape = (batch_size * shards.count, *leaf.shape[1:])
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    return pytree.tree_map(enlarge, call)


def set_class(module: nn.Module, module_class: type[nn.Module]) -> None:
    """Set the class of a module without calling a `__setattr__` that the model defines."""
    object.__setattr__(module, "__class__", module_class)


@contextmanager
def _in_training_mode(net: nn.Module) -> Iterator[None]:
    """Context in which `net` and all submodules are in training mode; restores modes on exit."""
    modes = [(module, module.training) for module in net.modules()]
    net.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def train_stages_in_calls(net: ParallelModule) -> None:
    """Let a loop train a model with pipeline stages by `loss = net(...)` and `loss.backward()`.

    `train_step` runs the forward and backward passes of all micro-batches in one schedule. In
    training, calling the model runs this schedule and stores the gradients; `loss.backward()` adds
    them to the parameters' `grad`, scaled by the gradient of the loss.
    """
    planned_class: Any = type(net)
    forward_as_planned = planned_class.forward
    if net.execution.devices.stages == 1 or hasattr(forward_as_planned, STEP_IN_CALL):
        return

    @wraps(forward_as_planned)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        # Without gradients there is no backward pass to run.
        if not (self.training and torch.is_grad_enabled()):
            return forward_as_planned(self, *args, **kwargs)
        trained = [p for p in self.parameters() if p.requires_grad]
        # Set aside, to tell the gradients of this step from accumulated ones.
        earlier = [p.grad for p in trained]
        for parameter in trained:
            parameter.grad = None
        try:
            loss = self.train_step(*args, **kwargs)
            gradients = [p.grad for p in trained]
        finally:
            for parameter, gradient in zip(trained, earlier, strict=True):
                parameter.grad = gradient
        # Autograd calls `backward` only if an input requires a gradient.
        start = torch.zeros((), device=loss.device, dtype=loss.dtype, requires_grad=True)
        # The backward pass of the step has run, so its loss has no graph.
        apply: Any = _LossWithStoredGradients.apply
        return apply(start, loss.detach(), trained, gradients)

    setattr(forward, STEP_IN_CALL, True)
    # Each planned model has a class of its own, which `sw.whole` exchanges for the user's.
    planned_class.forward = forward


def run_forward_in(net: ParallelModule, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Make `forward` of `net` run in a context such as autocast, and return float32 outputs."""
    planned_class: Any = type(net)
    forward_as_planned = planned_class.forward

    @wraps(forward_as_planned)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        with context():
            outputs = forward_as_planned(self, *args, **kwargs)
        # As Accelerate converts the outputs of models that it prepares.
        return pytree.tree_map(
            lambda x: x.float() if isinstance(x, Tensor) and x.dtype in HALF else x, outputs
        )

    planned_class.forward = forward


class _LossWithStoredGradients(torch.autograd.Function):
    """Loss of a pipeline step, whose backward pass adds the step's gradients to the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        loss: Tensor,
        parameters: list[nn.Parameter],
        gradients: list[Tensor | None],
    ) -> Tensor:
        ctx.parameters, ctx.gradients = parameters, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient of the loss is, for example, 1 / accumulation steps.
        scale = gradient.item()
        with torch.no_grad():
            for parameter, of_step in zip(ctx.parameters, ctx.gradients, strict=True):
                if of_step is None:
                    continue
                of_step.mul_(scale)
                parameter.grad = of_step if parameter.grad is None else parameter.grad + of_step
        # Their memory is free after the first `backward`, and a second one adds nothing.
        ctx.parameters = ctx.gradients = ()
        return torch.zeros_like(gradient), None, None, None


def _get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1

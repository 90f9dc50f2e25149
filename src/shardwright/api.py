"""The calls that users make: plan a model, look into it, run it split."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.communication import as_used, communication
from shardwright.decided import Decided
from shardwright.errors import PlanError, StrategyError
from shardwright.graph.capture import capture
from shardwright.graph.double import double, in_double
from shardwright.graph.graph import Graph, Value
from shardwright.graph.interpret import interpret
from shardwright.lower.devices import Devices
from shardwright.lower.parallel import parallel_module
from shardwright.lower.simulation import simulate
from shardwright.pins import pins_of
from shardwright.plan import Plan, make_plan
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts
from shardwright.search.presets import data_parallel, semi_auto, stand_alone
from shardwright.search.propagation import propagate
from shardwright.search.recursive import search
from shardwright.strategy import Fixed, OperatorStrategy, fix, storage_as_said

Search = Callable[[Graph, Fixed, dict[str, Any]], Mapping[str, Cuts]]

MODES: dict[str, Search] = {
    "recursive_programming": lambda graph, fixed, options: search(
        graph, fixed.mesh, pinned=fixed.cuts, **options
    ),
    "sharding_propagation": lambda graph, fixed, options: propagate(
        graph, fixed.mesh, fixed.cuts, fixed.outputs
    ),
    "semi_auto": lambda graph, fixed, options: semi_auto(graph, fixed.mesh, fixed.cuts),
    "data_parallel": lambda graph, fixed, options: data_parallel(graph, fixed.mesh),
    "stand_alone": lambda graph, fixed, options: stand_alone(graph, fixed.mesh),
}
WITHOUT_PINS = ("data_parallel", "stand_alone")
"""Modes that decide every operator themselves."""


class WithLoss(nn.Module):
    """A model and its loss as one module: `forward(x, y) = loss_fn(net(x), y)`."""

    def __init__(self, net: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss_fn = loss_fn

    def forward(self, x: Any, y: Any) -> Tensor:
        return self.loss_fn(self.net(x), y)


def plan(
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    devices: int,
    mode: str = "recursive_programming",
    mem_coeff: float = 0.1,
    cost_model: str = "symbolic",
    order: str = "weight",
    log_costs: bool = False,
) -> Plan:
    """Decides how every operator of `net` is split over `devices` devices.

    Needs no process group and touches no device; a model on the meta device will do.

    Args:
        net: a model, or a graph that was captured before.
        args, kwargs: an example of its call, with the whole batch; only shapes and dtypes matter.
        mode: `recursive_programming` (the double recursive search), `sharding_propagation` (from
            the operators that `shard` has pinned outwards, with the least redistribution),
            `semi_auto` (operators that `shard` has pinned as pinned, all others along the batch),
            `data_parallel` (everything follows the batch) or `stand_alone` (nothing is cut).
        mem_coeff: small values favour data parallel, large ones model parallel.
        cost_model: `symbolic`, the relative costs of the published search.
        order: in which the search takes operators, by `weight` or `topology`.
        log_costs: log every decision at level INFO of the logger `shardwright.search`.

    Raises:
        StrategyError: if an option is not valid, nothing can be cut, or an operator cannot be cut
            as it is pinned.
        LayoutError: if pinned layouts are not of this number of devices, or do not fit together.
        CaptureError: if the model cannot be captured.
    """
    _check_options(devices, mode, mem_coeff, cost_model, order)
    graph = net if isinstance(net, Graph) else capture(net, args, kwargs)
    pins = pins_of(graph)
    _check_takes_pins(mode, pins.strategies)
    fixed = fix(graph, devices, pins.strategies, pins.parameters)
    mesh = fixed.mesh
    started = time.perf_counter()
    options: dict[str, Any] = {}
    if mode == "recursive_programming":
        options = {"mem_coeff": mem_coeff, "order": order, "log_costs": log_costs}
    cuts = MODES[mode](graph, fixed, options)
    seconds = time.perf_counter() - started
    options.pop("log_costs", None)
    if mode == "recursive_programming":
        options["cost_model"] = cost_model
    return make_plan(
        graph,
        mesh,
        Decided(
            cuts,
            storage_as_said(graph, mesh, pins.parameters, as_used(graph, mesh, cuts)),
            fixed.outputs,
        ),
        mode=mode,
        options=options,
        search_seconds=seconds,
        training=net.training if isinstance(net, nn.Module) else True,
        pins=pins.strategies,
    )


def parallelize(net: nn.Module, plan: Plan, device: str | torch.device | None = None) -> nn.Module:
    """`net`, run as planned on the running process group: a module whose parameters are DTensors.

    Every rank must hold the same parameters when it calls this (build the model from one seed, or
    load it), and give the module the whole batch. On one device no process group is needed and the
    parameters stay plain. In eval mode, or for a batch of another size, the module captures the
    model once more and keeps the plan's cuts as far as they divide.

    Args:
        device: where this rank computes; by default the current accelerator if its process group
            is one, else the CPU.

    Raises:
        PlanError: if the plan is for another model or another number of devices.
    """
    where = torch.device(device) if device is not None else _own_device()
    devices = Devices.of_process(plan.mesh, where)
    with _in_mode(net, plan.training):
        graph = plan.graph if plan.graph is not None else capture(net, *_example(plan))
        plan.check_fits(graph)
        _check_parameters(net, plan)
        parallel = parallel_module(net, graph, devices, plan.decided)
    return parallel if parallel.training == net.training else parallel.train(net.training)


@contextmanager
def _in_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """`net` in training or eval mode for a while; modules that differ from it keep their own mode
    if the whole is in the mode already."""
    modes = [module.training for module in net.modules()]
    if net.training != training:
        net.train(training)
    yield
    for module, mode in zip(net.modules(), modes, strict=True):
        module.training = mode


@dataclass(frozen=True)
class Examination:
    """What Shardwright sees in a model before it plans it.

    Args:
        operators: number of operators.
        main: names of those that the search decides by cost.
        without_rule: names and operators of those that every device would compute whole.
        parameters: number of parameters.
    """

    operators: int
    main: tuple[str, ...]
    without_rule: tuple[tuple[str, str], ...]
    parameters: int

    def __str__(self) -> str:
        lines = [
            f"{self.operators} operators, {len(self.main)} of them main, "
            f"{self.parameters:,} parameters"
        ]
        if self.without_rule:
            lines.append("without a sharding rule, computed whole on every device:")
            lines += [f"  {name}: {target}" for name, target in self.without_rule]
        else:
            lines.append("every operator has a sharding rule")
        return "\n".join(lines)


def examine(
    net: nn.Module | Graph, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Examination:
    """Says up front what of a model can be split, and lists what cannot.

    Raises:
        CaptureError: if the model cannot be captured.
    """
    graph = net if isinstance(net, Graph) else capture(net, args, kwargs)
    found = [(op, rule_of(op)) for op in graph.ops]
    return Examination(
        operators=len(graph.ops),
        main=tuple(op.name for op, r in found if r is not None and r.main is not None),
        without_rule=tuple((op.name, str(op.target)) for op, r in found if r is None),
        parameters=sum(value.numel for value in graph.parameters),
    )


@dataclass(frozen=True)
class Check:
    """A plan's program on simulated ranks, compared with the model on one device.

    Args:
        loss: on one device; None if the model has no scalar loss.
        loss_difference: largest difference of any output.
        gradient_difference: largest difference of any parameter's gradient, relative to the
            largest gradient of that parameter.
        worst_parameter: the parameter where that is.
        replica_difference: largest difference between ranks that should hold the same.
        counted_bytes: what one device sent, forward and backward, counted while it ran.
        planned_bytes: what the plan says.
    """

    loss: float | None
    loss_difference: float
    gradient_difference: float
    worst_parameter: str
    replica_difference: float
    counted_bytes: tuple[int, int]
    planned_bytes: tuple[int, int]

    def passes(self, tolerance: float = 1e-9) -> bool:
        """Whether every difference is within `tolerance` and the bytes are as planned."""
        worst = max(self.loss_difference, self.gradient_difference, self.replica_difference)
        return worst <= tolerance and self.counted_bytes == self.planned_bytes


def check(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, plan: Plan
) -> Check:
    """Runs the planned program on simulated ranks in this process against one device, in float64.

    Random operators cannot be compared: put the model in eval mode, or set dropout to 0.

    Raises:
        PlanError: if the plan is for another model, or a process group is running.
    """
    captured = plan.graph if plan.graph is not None else capture(net, args, kwargs)
    plan.check_fits(captured)
    graph = in_double(captured)
    named = dict(net.named_parameters(remove_duplicate=False))
    parameters = {
        v.name: double(named[v.name]).requires_grad_(v.requires_grad) for v in graph.parameters
    }
    state = dict(net.named_buffers(remove_duplicate=False))
    buffers = {v.name: double(state[v.name]) for v in graph.buffers}
    args, kwargs = pytree.tree_map_only(Tensor, double, (args, kwargs or {}))
    wanted, _ = interpret(graph, parameters, buffers, args, kwargs)
    leaves = pytree.tree_leaves(wanted)
    ends = _output_gradients(graph, leaves)
    for tensor, gradient in ends:
        if gradient is not None:
            torch.autograd.backward(tensor, gradient, retain_graph=True)
    outcome = simulate(
        graph,
        plan.mesh,
        plan.decided,
        parameters,
        buffers,
        pytree.tree_leaves((args, kwargs)),
        output_gradients=[gradient for _, gradient in ends],
    )
    outputs = [t for t in outcome.outputs if isinstance(t, Tensor)]
    differences = {
        name: _relative(outcome.gradients[name], parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    worst = max(differences, key=lambda name: differences[name], default="")
    flow = communication(graph, plan.mesh, plan.decided)
    return Check(
        loss=_loss(graph, leaves),
        loss_difference=max(
            (_relative(a, b) for a, (b, _) in zip(outputs, ends, strict=True)), default=0.0
        ),
        gradient_difference=differences.get(worst, 0.0),
        worst_parameter=worst,
        replica_difference=outcome.replica_difference,
        counted_bytes=(outcome.forward_bytes, outcome.backward_bytes),
        planned_bytes=(flow.forward_bytes, flow.backward_bytes),
    )


def _output_gradients(graph: Graph, leaves: list[Any]) -> list[tuple[Tensor, Tensor | None]]:
    """Every output tensor with the gradient that starts there: 1 for the loss; if there is none,
    distinct numbers for every output, so that no error can cancel."""
    found: list[tuple[Tensor, Tensor | None]] = []
    for value, tensor in zip(graph.outputs, leaves, strict=True):
        if not isinstance(value, Value):
            continue
        starts = value is graph.loss or (graph.loss is None and tensor.is_floating_point())
        gradient = None
        if starts and tensor.requires_grad:
            steps = torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
            gradient = torch.ones_like(tensor) if value is graph.loss else torch.sin(1 + steps)
        found.append((tensor, gradient))
    return found


def _loss(graph: Graph, leaves: list[Any]) -> float | None:
    for value, tensor in zip(graph.outputs, leaves, strict=True):
        if value is graph.loss and graph.loss is not None:
            return float(tensor.detach())
    return None


def _relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest element where that is above 1."""
    if not wanted.numel():
        return 0.0
    scale = max(1.0, wanted.detach().abs().max().item()) if wanted.is_floating_point() else 1.0
    return (got.detach().double() - wanted.detach().double()).abs().max().item() / scale


def _own_device() -> torch.device:
    """The current accelerator if the process group (if any) works on it, else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    if dist.is_initialized() and accelerator.type not in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _example(plan: Plan) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the shapes that the plan was made for, on the meta device."""
    leaves = [
        torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device="meta")
        if isinstance(leaf, dict)
        else leaf
        for leaf in plan.inputs
    ]
    args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(plan.structure))
    return args, kwargs


def _check_parameters(net: nn.Module, plan: Plan) -> None:
    """Raises:
    PlanError: if a planned parameter is missing in `net` or has another shape.
    """
    named = dict(net.named_parameters(remove_duplicate=False))
    for name, (shape, _) in plan.parameters.items():
        if name not in named:
            raise PlanError(f"the plan has a parameter {name!r} that the model does not have")
        if tuple(named[name].shape) != shape:
            raise PlanError(
                f"parameter {name!r} has shape {tuple(named[name].shape)}, planned as {shape}"
            )


def _check_takes_pins(mode: str, pinned: Mapping[str, OperatorStrategy]) -> None:
    if pinned and mode in WITHOUT_PINS:
        names = ", ".join(list(pinned)[:5]) + (" …" if len(pinned) > 5 else "")
        valid = ", ".join(name for name in MODES if name not in WITHOUT_PINS)
        raise StrategyError(
            f"mode={mode!r} decides every operator itself, but shard has pinned {names};"
            f" modes that take pins are {valid}"
        )


def _check_options(devices: int, mode: str, mem_coeff: float, cost_model: str, order: str) -> None:
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise StrategyError(f"devices={devices!r}: must be a whole number of at least 1")
    for what, given, valid in (
        ("mode", mode, tuple(MODES)),
        ("cost_model", cost_model, ("symbolic",)),
        ("order", order, ("weight", "topology")),
    ):
        if given not in valid:
            raise StrategyError(f"{what}={given!r}: valid are {', '.join(valid)}")
    if not isinstance(mem_coeff, int | float) or not mem_coeff > 0:
        raise StrategyError(f"mem_coeff={mem_coeff!r}: must be a positive number")

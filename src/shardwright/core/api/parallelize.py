"""Run a model as planned on the running process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from shardwright.core.agreement.collective import check_description, gathered
from shardwright.core.api.not_distributed import check_not_distributed
from shardwright.core.api.same_model import check_ranks_agree, take_state_of_rank_0
from shardwright.core.api.shared_plan import are_all_ranks, shared_graph
from shardwright.core.capture.attributes import has_attributes
from shardwright.core.capture.autocast import Autocast
from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.misuse.original import OriginalModel
from shardwright.core.parallel.module import parallel_module
from shardwright.core.parallel.train_step import check_whole_batch
from shardwright.core.partition.fold_axes import dtensor_axes
from shardwright.core.plan import Plan
from shardwright.core.planner.pipeline import Pipeline
from shardwright.core.runtime.accelerator import device_of_group, use_device
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import of_micro_batches
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError, ShardwrightError


def parallelize(
    net: nn.Module,
    plan: Plan,
    device: str | torch.device | None = None,
    *,
    copy: bool = False,
    sync: bool = True,
    release: bool = False,
    named_ranges: bool = False,
) -> nn.Module:
    """Shard `net` in place as planned, to run on the running process group: its parameters become
    DTensors, and its class one derived from its own, as with `fully_shard`.

    Every rank must call this, with the same model and plan, and give the module the whole batch. As
    with `DistributedDataParallel`, `net` takes rank 0's parameters and buffers on all ranks. On one
    device no process group is needed and the parameters stay plain. In eval mode, for a batch of
    another size, or with other arguments of `forward`, the module captures the model once more and
    keeps the plan's shardings where they divide the sizes evenly.

    Args:
        plan: a plan of this model, made here or loaded from a file.
        device: where this rank computes; by default its accelerator if its process group works on
            one, else the CPU.
        copy: whether to shard a copy and leave `net` as it is, for a teacher or a reference.
        sync: False skips comparing and copying rank 0's values, where all ranks are known to have
            the same ones.
        release: whether to free the full parameters of `net` as soon as their shards are taken,
            even where an optimizer or a list still refers to them.
        named_ranges: whether to name operators, collectives, buckets and stages in traces of
            `torch.profiler`. Costs some microseconds each; not for `torch.compile`.

    Returns:
        `net`, or with `copy` its planned copy.

    Raises:
        PlanError: if the plan is for another model or another number of devices, the ranks have
            different models or plans, or `net` is planned or wrapped already.
        StrategyError: if the micro-batches of the plan would train another loss than the batch.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan={plan!r} is not a plan\n"
            "pass the result of `sw.plan(net, batch, devices=8)`, or `sw.Plan.load(path)`"
        )
    check_not_distributed(net)
    net = net.net if isinstance(net, Pipeline) else net
    rank_device = torch.device(device) if device is not None else device_of_group()
    use_device(rank_device)
    with _in_mode(net, plan.training):
        graph = _agreed_graph(net, plan, rank_device)
        partitioned = plan.partition(graph)
        devices = Devices.of_process(
            partitioned.mesh,
            rank_device,
            plan.pipeline.stages,
            dtensor_axes(partitioned),
            named_ranges=named_ranges,
        )
        # Before sharding: afterwards ranks have different blocks of each parameter.
        if sync and devices.is_distributed:
            take_state_of_rank_0(net, rank_device)
        parallel = parallel_module(net, partitioned, devices, copy=copy, release=release)
    # A copy is made while `net` is in the planned mode.
    if parallel.training != net.training:
        parallel.train(net.training)
    if copy:
        parallel.execution.original = OriginalModel(net, graph.attributes)
    return parallel


def _agreed_graph(net: nn.Module, plan: Plan, device: torch.device) -> Graph:
    """Return the graph of `net`, after checking that the plan fits it on all ranks.

    Raises:
        PlanError: if models or plans differ.
    """
    without_other_ranks = not are_all_ranks(plan.devices)
    autocast = Autocast.inside(device)

    def captured_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        return capture(net, args, kwargs, compute_dtype=plan.computed_in, autocast=autocast)

    def captured() -> Graph:
        example = _example(plan)
        graph = captured_for(*example)
        if not plan.pipeline.averages_micro_batches:
            return graph
        leaves, spec = pytree.tree_flatten(example)

        def of_batch(number: int) -> Graph:
            return captured_for(
                *pytree.tree_unflatten(
                    of_micro_batches(leaves, number, plan.pipeline.batch_dims), spec
                )
            )

        return with_whole_batch(graph, plan.pipeline.micro_batches, of_batch)

    try:
        # A plan made in this process has its graph, a loaded one does not: then rank 0 captures the
        # model for all ranks, as capturing takes seconds to minutes of every CPU of a machine.
        graph = plan.graph
        if not without_other_ranks:
            ranks_without_graph = gathered(torch.tensor(graph is None, device=device))
            if ranks_without_graph.any():
                received_graph = shared_graph(net, plan, lambda: graph or captured())
                graph = graph or received_graph
        # Before a capture, which would end in an error of `forward` for a model of other shapes.
        if graph is not None:
            _check_parameters(net, plan)
        # A graph is valid only for the device type of its autocast regions, and for the attributes
        # of modules (numbers, flags, hooks) that it was captured with.
        if graph is not None and not autocast.acts_as(graph.autocast_on):
            graph = None
        means = plan.pipeline.averages_micro_batches
        if graph is not None and means and graph.whole_batch is None:
            graph = None
        if graph is None or not has_attributes(net, graph.attributes):
            graph = captured()
        plan.check_fits(graph)
        if means:
            check_whole_batch(graph, plan.pipeline.micro_batches)
        _check_parameters(net, plan)
    except ShardwrightError as error:
        if not without_other_ranks:
            # Other ranks wait for this rank's description. If all fail, none waits.
            with suppress(PlanError):
                check_description([f"an error, {error}"], device)
        raise
    if not without_other_ranks:
        check_ranks_agree(net, graph, plan, device)
    return graph


@contextmanager
def _in_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """Context in which `net` is in training or eval mode.

    If it is in that mode already, submodules in the other mode keep theirs.
    """
    modes = [module.training for module in net.modules()]
    if net.training != training:
        net.train(training)
    try:
        yield
    finally:
        for module, mode in zip(net.modules(), modes, strict=True):
            module.training = mode


def _example(plan: Plan) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Meta tensors with the shapes of the planned inputs."""
    leaves = [
        torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device="meta")
        if isinstance(leaf, dict)
        else leaf
        for leaf in plan.inputs
    ]
    try:
        args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(plan.structure))
    except ValueError as error:
        raise PlanError(f"the plan's inputs are malformed: {error}") from None
    return args, kwargs


def _check_parameters(net: nn.Module, plan: Plan) -> None:
    """Check the planned parameters of `net`.

    Raises:
        PlanError: if one is missing, has another shape, or was created in inference mode.
    """
    named = dict(net.named_parameters(remove_duplicate=False))
    for name, tensor in (*named.items(), *net.named_buffers()):
        if tensor.is_inference():
            raise PlanError(
                f"{name!r} was created in inference mode, so autograd cannot record it\n"
                "build the model outside of `torch.inference_mode()`, or under `torch.no_grad()`"
            )
    for name, (shape, _) in plan.parameters.items():
        if name not in named:
            raise PlanError(
                f"the plan has a parameter {name!r} that the model does not have\n"
                "plan this model, or build the model as it was planned"
            )
        if tuple(named[name].shape) != shape:
            raise PlanError(
                f"parameter {name!r} has shape {tuple(named[name].shape)}, planned as {shape}\n"
                "plan this model, or build the model as it was planned"
            )

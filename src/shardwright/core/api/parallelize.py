"""`sw.parallelize`: shard a model as planned over the ranks of the process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
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
from shardwright.core.parallel.train_step import check_loss_of_batch
from shardwright.core.partition.fold_axes import dtensor_axes
from shardwright.core.plan import Plan
from shardwright.core.planner.pipeline import Pipeline
from shardwright.core.runtime.accelerator import device_of_group, use_device
from shardwright.core.runtime.counted_calls import rank_calls
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import empty_full_batch
from shardwright.core.runtime.rank_calls import WARN_AFTER
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
    """Shard `net` in place as planned, over the ranks of the process group.

    As with `fully_shard`, parameters become DTensors, and the class of `net` is replaced by a
    derived class.

    Every rank must call this function with the same model and plan, and call the model with the
    global batch unless the plan has another `dataset_strategy`. As with `DistributedDataParallel`,
    parameters and buffers are broadcast from rank 0. A plan for one device needs no process group,
    and parameters stay ordinary tensors. For eval mode, other batch sizes or other arguments of
    `forward`, the model is captured once more, with the plan's sharding where sizes are divisible.

    Args:
        net: the model.
        plan: a plan of `net`, made by this process or loaded from a file.
        device: device of this rank; by default its accelerator if the process group has a backend
            for accelerators, else the CPU.
        copy: whether to shard a copy and leave `net` unchanged, for a teacher or a reference.
        sync: whether to broadcast parameters and buffers from rank 0; False if values of all ranks
            are equal.
        release: whether to free each full parameter of `net` as soon as its shard is copied, even
            if an optimizer or a list still refers to the parameter.
        named_ranges: whether to name operators, collectives, buckets and stages in traces of
            `torch.profiler`. Costs some microseconds per range; not supported by `torch.compile`.

    Returns:
        `net` or, with `copy`, its planned copy.

    Raises:
        PlanError: if the plan is for another model or another number of devices, models or plans
            differ between ranks, or `net` is planned or wrapped already.
        StrategyError: if the loss of the global batch is not the sum or mean of the losses of the
            plan's micro-batches.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan={plan!r} is not a plan\n"
            "pass the result of `sw.plan(net, batch, devices=8)` or of `sw.Plan.load(path)`"
        )
    check_not_distributed(net)
    net = net.net if isinstance(net, Pipeline) else net
    # From here on calls are counted, and a rank that calls alone is named. This call waits in the
    # store only until it has warned: a collective detects a rank that has ended before its first
    # call, as that rank has closed its connection.
    calls = rank_calls() if are_all_ranks(plan.devices) else None
    with nullcontext() if calls is None else calls.call("parallelize", max_wait=WARN_AFTER):
        number = 1 if calls is None else calls.number_of("parallelize")
        return _shard_model(net, plan, device, copy, sync, release, named_ranges, number)


def _shard_model(
    net: nn.Module,
    plan: Plan,
    device: str | torch.device | None,
    copy: bool,
    sync: bool,
    release: bool,
    named_ranges: bool,
    number: int,
) -> nn.Module:
    # Before the capture, whose autocast regions depend on the type of the device.
    rank_device = torch.device(device) if device is not None else device_of_group()
    use_device(rank_device)
    # The graph of a plan is that of one mode: dropout and batch norms differ in the other.
    with _with_training_mode(net, plan.training):
        graph = _capture_checked_graph(net, plan, rank_device)
        partitioned = plan.partition(graph)
        devices = Devices.of_process(
            partitioned.mesh,
            rank_device,
            plan.pipeline.stages,
            dtensor_axes(partitioned),
            named_ranges=named_ranges,
        )
        devices.model = number
        # Before sharding: afterwards ranks have different shards of each parameter.
        if sync and devices.is_distributed:
            take_state_of_rank_0(net, rank_device)
        parallel = parallel_module(net, partitioned, devices, copy=copy, release=release)
    # The copy was made while `net` was in the planned mode.
    if parallel.training != net.training:
        parallel.train(net.training)
    if copy:
        parallel.execution.original = OriginalModel(net, graph.attributes)
    return parallel


def _capture_checked_graph(net: nn.Module, plan: Plan, device: torch.device) -> Graph:
    """Return the graph of `net`, and check that model and plan match and are equal on all ranks.

    Raises:
        PlanError: if models or plans differ between ranks, or the plan is for another model.
    """
    without_other_ranks = not are_all_ranks(plan.devices)
    autocast = Autocast.inside(device)

    def captured_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        return capture(net, args, kwargs, compute_dtype=plan.computed_in, autocast=autocast)

    def captured() -> Graph:
        example = _make_meta_arguments(plan)
        graph = captured_for(*example)
        if not plan.pipeline.averages_micro_batches:
            return graph
        leaves, spec = pytree.tree_flatten(example)

        def of_batch(number: int) -> Graph:
            return captured_for(
                *pytree.tree_unflatten(
                    empty_full_batch(leaves, number, plan.pipeline.batch_dims), spec
                )
            )

        pipeline = plan.pipeline
        return with_whole_batch(graph, pipeline.micro_batches, of_batch, pipeline.batch_norm)

    try:
        # A plan that was made in this process has a graph, a loaded plan has none. Then rank 0
        # captures the model for all ranks, as a capture takes seconds to minutes of CPU time.
        graph = plan.graph
        if not without_other_ranks:
            # Gathered, so that all ranks decide alike whether to share a graph, which is
            # collective.
            ranks_without_graph = gathered(torch.tensor(graph is None, device=device))
            if ranks_without_graph.any():
                received_graph = shared_graph(net, plan, lambda: graph or captured())
                # A rank's own graph is kept, as the shared one lacks tags.
                graph = graph or received_graph
        # Before a capture, in which `forward` of a model with other shapes would raise an error.
        if graph is not None:
            _check_parameters(net, plan)
        # A graph is valid only for the device type of its autocast regions, and for the attributes
        # of modules (numbers, flags, hooks) that it was captured with.
        if graph is not None and not autocast.acts_as(graph.autocast_on):
            graph = None
        # A graph that was captured for one batch has not been analyzed for micro-batches.
        means = plan.pipeline.averages_micro_batches
        if graph is not None and means and graph.whole_batch is None:
            graph = None
        if graph is None or not has_attributes(net, graph.attributes):
            graph = captured()
        plan.check_fits(graph)
        if means:
            check_loss_of_batch(graph, plan.pipeline.micro_batches)
        # Also for a graph that was captured only now.
        _check_parameters(net, plan)
    except ShardwrightError as error:
        if not without_other_ranks:
            # Other ranks wait for this rank's description, unless they fail too.
            with suppress(PlanError):
                check_description([f"an error, {error}"], device)
        raise
    if not without_other_ranks:
        check_ranks_agree(net, graph, plan, device)
    return graph


@contextmanager
def _with_training_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """Context manager in which `net` is in training or eval mode.

    If `net` is in that mode already, modes of submodules are not changed.
    """
    # Of each submodule, as `train` sets the mode of all.
    modes = [module.training for module in net.modules()]
    if net.training != training:
        net.train(training)
    try:
        yield
    finally:
        for module, mode in zip(net.modules(), modes, strict=True):
            module.training = mode


def _make_meta_arguments(plan: Plan) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call with meta tensors of the planned shapes and dtypes.

    Raises:
        PlanError: if the plan's inputs cannot be read.
    """
    leaves = [
        torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device="meta")
        if isinstance(leaf, dict)
        else leaf
        for leaf in plan.inputs
    ]
    try:
        args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(plan.structure))
    except ValueError as error:
        raise PlanError(f"the plan's inputs are malformed: {error}\nplan the model again") from None
    return args, kwargs


def _check_parameters(net: nn.Module, plan: Plan) -> None:
    """Check that `net` has the planned parameters, and no tensors created in inference mode.

    Raises:
        PlanError: if a parameter is missing or has another shape, or a parameter or buffer was
            created in inference mode.
    """
    # All names of a tied parameter, as the plan has one of them.
    named = dict(net.named_parameters(remove_duplicate=False))
    for name, tensor in (*named.items(), *net.named_buffers()):
        if tensor.is_inference():
            raise PlanError(
                f"{name!r} was created in inference mode, so autograd cannot record it\n"
                "build the model outside `torch.inference_mode()`; `torch.no_grad()` is supported"
            )
    for name, (shape, _) in plan.parameters.items():
        if name not in named:
            raise PlanError(
                f"the plan has a parameter {name!r}, which the model does not have\n"
                "plan this model, or build the model as it was planned"
            )
        if tuple(named[name].shape) != shape:
            raise PlanError(
                f"parameter {name!r} has shape {tuple(named[name].shape)}, but {shape} in the "
                "plan\nplan this model, or build the model as it was planned"
            )

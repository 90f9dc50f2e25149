"""Capture a model and search for a plan, given all options as one `PlanOptions`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.api.micro_batch_graph import MicroBatchCapture
from shardwright.core.api.save_graphs import SavedGraphs
from shardwright.core.api.shared_plan import are_all_ranks, shared_plan
from shardwright.core.capture.autocast import Autocast
from shardwright.core.capture.capture import capture
from shardwright.core.constraints.shard import pins_of
from shardwright.core.cost.cluster import LOCAL
from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.python_call import ONCE_PER_BATCH
from shardwright.core.micro_batches.batch_dims import other_sample_dims
from shardwright.core.micro_batches.interpolated_graph import GraphsBySize
from shardwright.core.parallel.train_step import check_loss_of_batch
from shardwright.core.plan import Plan
from shardwright.core.plan.ranked import LeftOut
from shardwright.core.planner.best_candidate import best_candidate, raised_gc_threshold
from shardwright.core.planner.candidate import Candidate, PlanTask
from shardwright.core.planner.captured_model import CapturedModel
from shardwright.core.planner.choose_micro_batches import fastest_over_micro_batches
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.pipeline import Pipeline, merged_options
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.core.runtime.accelerator import device_of_group
from shardwright.core.runtime.micro_batches import (
    SampleDims,
    valid_num_micro_batches,
)
from shardwright.core.torch_internals import pytree
from shardwright.errors import MixedSamplesError, StrategyError

log = logging.getLogger("shardwright.search")


def plan_collectively(
    options: PlanOptions,
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Plan:
    """Plan on rank 0 for all ranks if a process group of `options.devices` ranks is running, else
    in this process.

    Args:
        options: all options of the plan.
        net: a model, or a captured graph.
        args, kwargs: example arguments with the global batch.

    Raises:
        ShardwrightError: if the model cannot be captured or planned.
    """
    if not are_all_ranks(options.devices):
        return plan_model(options, net, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # A plan depends on shapes and dtypes only, so ranks may pass other values.
    shapes = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]
    # Ranks compare their requests; callbacks are often different closures on each rank.
    request_options = {**vars(options), "on_progress": None, "save_graphs": None}
    if options.cluster is not None and options.resolved_cluster.name == LOCAL:
        request_options["cluster"] = LOCAL  # Each machine measures itself, with different results.
    request = (request_options, net, shapes, repr(spec))
    shared = shared_plan(request, lambda: plan_model(options, net, args, kwargs))
    # The optimizer is not sent: each rank keeps its own object.
    return replace(shared, optimizer=options.optimizer)


def plan_model(
    options: PlanOptions,
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Plan:
    """Plan in this process only, without communication.

    Args:
        options: all options of the plan.
        net: a model, or a captured graph.
        args, kwargs: example arguments with the global batch.

    Raises:
        ShardwrightError: if the model cannot be captured or planned.
    """
    return decide_model(options, net, args, kwargs).plan()


@raised_gc_threshold()
def decide_model(
    options: PlanOptions,
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    ranking: Ranking | None = None,
) -> Candidate:
    """Return the best candidate of a search; `Candidate.plan` builds the plan.

    Args:
        options: all options of the plan.
        net: a model, or a captured graph.
        args, kwargs: example arguments with the global batch.
        ranking: collects the fastest candidate of each kind of plan, if given.

    Raises:
        ShardwrightError: if the model cannot be captured or planned.
        OSError: if `save_graphs` cannot be written.
    """
    if options.log_costs and not (log.isEnabledFor(logging.INFO) and log.hasHandlers()):
        log.warning(
            "log_costs=True logs at level INFO, which the logger 'shardwright.search' does not"
            " show\n"
            "call `logging.basicConfig(level=logging.INFO)` before `plan`"
        )
    if options.save_graphs is None:
        return _search_best_candidate(options, net, args, kwargs, ranking)
    files = SavedGraphs(options.save_graphs)
    with files.saving_errors():
        candidate = _search_best_candidate(options, net, args, kwargs, ranking, files)
        # With `micro_batches="auto"` the last captured graph may be of another candidate.
        files.graph(candidate.model.graph)
        files.plan(candidate.plan())
    return candidate


def _search_best_candidate(
    options: PlanOptions,
    net: nn.Module | Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    ranking: Ranking | None,
    files: SavedGraphs | None = None,
) -> Candidate:
    loss_reduction = "mean"
    if isinstance(net, Pipeline):
        options, loss_reduction, net = merged_options(options, net), net.loss_reduction, net.net
    if not options.chooses_micro_batches:
        return best_candidate(
            [plan_task(options, net, args, kwargs, loss_reduction, ranking, files=files)], ranking
        )
    if isinstance(net, Graph):
        raise StrategyError(
            "micro_batches='auto' needs a model: the size of a graph's micro-batches is fixed\n"
            "plan the model, or pass the number of micro-batches: `micro_batches=4`"
        )
    leaves = pytree.tree_leaves((args, dict(kwargs or {})))
    numbers = valid_num_micro_batches(leaves)
    # Under a new name, as mypy does not narrow the type of `net` in the nested function.
    model, graphs = net, GraphsBySize()

    def prepare(number: int, captured: bool) -> PlanTask:
        # Each number of micro-batches is a search of its own, over graphs that `graphs` caches.
        fixed = replace(options, micro_batches=number)
        with graphs.deriving(not captured) as uses_derived:
            task = plan_task(fixed, model, args, kwargs, loss_reduction, ranking, graphs, files)
        return replace(task, is_derived=uses_derived())

    return fastest_over_micro_batches(numbers, prepare, ranking)


def plan_task(
    options: PlanOptions,
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss_reduction: str = "mean",
    ranking: Ranking | None = None,
    graphs: GraphsBySize | None = None,
    files: SavedGraphs | None = None,
) -> PlanTask:
    """Capture a model for a fixed number of micro-batches.

    Args:
        loss_reduction: reduction over the losses of micro-batches, `mean` or `sum`.
        ranking: records why a number of micro-batches is impossible.
        graphs: cached graphs of the model for other numbers of micro-batches.
        files: writes the captured graph as text.

    Raises:
        ShardwrightError: if the model cannot be captured or planned.
    """
    averages = options.num_micro_batches > 1 and loss_reduction == "mean"
    graph, batch_dims = _capture_micro_batch(options, net, args, kwargs, averages, graphs)
    if files is not None:
        files.graph(graph)
    sums = options.num_micro_batches > 1 and not averages
    if sums and graph.python is not None and graph.python.depends_on_calls:
        raise MixedSamplesError(ONCE_PER_BATCH)
    if averages:
        try:
            check_loss_of_batch(graph, options.num_micro_batches)
        except StrategyError:
            # Other numbers of micro-batches may still have a plan: the ranking says why this one
            # has none.
            if ranking is not None:
                reason = LeftOut.because("the loss of the batch does not follow from micro-batches")
                ranking.leave_out(requested_kind(replace(options, stages=1)), reason)
            raise
    if any(batch_dims) and options.dataset_strategy != "full_batch":
        raise StrategyError(
            f"the batch dimensions of the arguments are {batch_dims}, but with this "
            "dataset_strategy local batches are split along dimension 0\nplan with "
            "`dataset_strategy='full_batch'`, or make dimension 0 the batch dimension of all "
            "inputs"
        )
    # With micro-batches the capture has determined the batch dimensions.
    if options.num_micro_batches == 1 and options.dataset_strategy == "full_batch":
        batch_dims = other_sample_dims(graph)
    model = CapturedModel(
        graph,
        pins_of(graph, options.axis_matrix, options.dataset_strategy),
        () if isinstance(net, Graph) else tuple(name for name, _ in net.named_modules()),
        net.training if isinstance(net, nn.Module) else True,
        loss_reduction,
        batch_dims,
        DryRunCache(options.on_accelerator),
    )
    return PlanTask(model, options)


def _capture_micro_batch(
    options: PlanOptions,
    net: nn.Module | Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    averages: bool,
    graphs: GraphsBySize | None,
) -> tuple[Graph, SampleDims]:
    """Capture a model for one micro-batch.

    Args:
        options: all options of the plan.
        net: a model, or a captured graph, which is returned unchanged.
        args, kwargs: example arguments with the global batch.
        averages: whether the loss of the global batch must be the mean of the losses of
            micro-batches; otherwise their sum.
        graphs: graphs of the model for other numbers of micro-batches.

    Returns:
        The graph, and the batch dimension of each leaf of the call; () for a captured graph, or if
        all batch dimensions are 0.

    Raises:
        StrategyError: if `net` is a graph captured with another dtype than requested.
        CaptureError: if the model cannot be captured.
    """
    dtype = _get_compute_dtype(options)
    if isinstance(net, nn.Module):
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))

        def captured(leaves: list[Any]) -> Graph:
            return _capture_module(options, net, *pytree.tree_unflatten(leaves, spec))

        def graph_of(leaves: list[Any]) -> Graph:
            return captured(leaves) if graphs is None else graphs.graph(leaves, captured)

        micro_batch = MicroBatchCapture(
            graph_of, leaves, options.num_micro_batches, averages, options.batch_norm
        )
        return micro_batch.graph(options.batch_dims)
    if options.compute_dtype is not None and net.compute_dtype != dtype:
        raise StrategyError(
            f"compute_dtype={options.compute_dtype!r}, but the graph was captured with"
            f" compute_dtype={net.compute_dtype}\ncapture the model with the same compute_dtype, or"
            " plan the model instead of the graph"
        )
    return net, ()


def _capture_module(
    options: PlanOptions, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Graph:
    options.on_progress("capture")
    return capture(
        net,
        args,
        kwargs,
        compute_dtype=_get_compute_dtype(options),
        on_progress=options.on_progress,
        autocast=Autocast(_get_device_type(options)),
    )


def _get_compute_dtype(options: PlanOptions) -> torch.dtype | None:
    # In float32 nothing is cast.
    return None if options.compute_dtype in (None, "float32") else torch.bfloat16


def _get_device_type(options: PlanOptions) -> str | None:
    """Return the type of the devices for which the model is planned; None if unknown."""
    here = device_of_group()
    # Plans for a cluster are often made on a CPU, whose autocast differs from the cluster's.
    elsewhere = options.cluster is not None and options.resolved_cluster.name != LOCAL
    return None if elsewhere and here.type == "cpu" else here.type

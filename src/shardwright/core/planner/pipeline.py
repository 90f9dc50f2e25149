"""`sw.Pipeline`, and the `PipelineSpec` of a plan from its options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.core.graph.graph import Graph
from shardwright.core.parallel.module_wrapper import ModuleWrapper
from shardwright.core.parallel.train_step import loss_of
from shardwright.core.partition.pipeline_spec import REDUCTIONS, PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.options import COUNT, PlanOptions
from shardwright.core.runtime.micro_batches import SampleDims, micro_batch
from shardwright.core.search.configured_stages import StageConfig, configured_stages
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError


class Pipeline(ModuleWrapper):
    """A model to run in pipeline stages on micro-batches.

    A `Pipeline` has the parameters, buffers and parameter names of `net`. `sw.plan` divides the
    model into stages; before that, a call returns the loss that a planned step trains, on one
    device.

    Args:
        net: model that returns its loss.
        micro_batches: number of micro-batches per batch; at least the number of stages.
        stage_config: index of the stage of each module of `net`, by module name; by default the
            planner assigns stages.
        loss_reduction: `mean` for the loss of the full batch, `sum` for the sum of the losses of
            the micro-batches.

    Raises:
        StrategyError: if an argument is invalid.
    """

    def __init__(
        self,
        net: nn.Module,
        micro_batches: int,
        stage_config: StageConfig | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise StrategyError(
                f"Pipeline: `net` must be an nn.Module, not {type(net).__name__}\n"
                "pass the model, as in sw.Pipeline(net, micro_batches=4)"
            )
        if not COUNT.accepts(micro_batches):
            raise StrategyError(COUNT.error("micro_batches", micro_batches))
        if loss_reduction not in REDUCTIONS:
            raise StrategyError(
                f"loss_reduction={loss_reduction!r}: must be one of {', '.join(REDUCTIONS)}\n"
                "use loss_reduction='mean' for the loss of the full batch"
            )
        self.micro_batches = micro_batches
        # A copy, as the model may be planned after the caller has changed the mapping.
        self.stage_config = None if stage_config is None else dict(stage_config)
        self.loss_reduction = loss_reduction
        self.wrap(net)

    @property
    def net(self) -> nn.Module:
        """The wrapped model."""
        return self._wrapped[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Plans are compared with this loss. The mean of the losses of micro-batches would be
        # another loss if they divide by different numbers.
        results = []
        count = self.micro_batches if self.loss_reduction == "sum" else 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for index in range(count):
            micro_args, micro_kwargs = pytree.tree_unflatten(
                micro_batch(leaves, index, count), spec
            )
            results.append(self.net(*micro_args, **micro_kwargs))
        if not isinstance(results[0], torch.Tensor) or results[0].ndim:
            raise StrategyError(
                "Pipeline: the model must return its loss, a tensor of one element without"
                " dimensions\nfor other outputs, call the model itself, `pipeline.net(...)`"
            )
        return torch.stack(results).sum()


def merged_options(options: PlanOptions, pipeline: Pipeline) -> PlanOptions:
    """Return `options` with the micro-batches and the `stage_config` of `pipeline`.

    Raises:
        StrategyError: if `options` and `pipeline` contradict each other.
    """
    # 1 is the default of the option, so that it may not have been requested.
    if options.micro_batches not in (1, pipeline.micro_batches):
        raise StrategyError(
            f"micro_batches={options.micro_batches} contradicts Pipeline(net,"
            f" micro_batches={pipeline.micro_batches})\nremove micro_batches from sw.plan"
        )
    if pipeline.stage_config is None:
        return replace(options, micro_batches=pipeline.micro_batches)
    if options.stage_config is not None:
        raise StrategyError(
            "stage_config is given twice, to plan and to Pipeline\nremove it from one of them"
        )
    return replace(
        options, micro_batches=pipeline.micro_batches, stage_config=pipeline.stage_config
    )


def pipeline_spec(
    options: PlanOptions,
    graph: Graph,
    modules: Iterable[str],
    loss_reduction: str,
    batch_dims: SampleDims = (),
) -> PipelineSpec:
    """Return the `PipelineSpec` of a captured model.

    Operators are assigned to chunks only if `stage_config` is given; otherwise `chunk_of` is empty,
    and stages are balanced after the search, as the time of an operator depends on its cuts.

    Args:
        modules: module names that are valid in `stage_config` although they have no operators.
        loss_reduction: reduction over the losses of micro-batches, `mean` or `sum`.
        batch_dims: sample dimension of each leaf of the model's arguments; empty if it is 0 for
            all.

    Raises:
        StrategyError: if the requested stages are invalid.
        PlanError: if the model returns several losses, as micro-batches train a single one.
    """
    # Called for its error: the model may return several losses.
    if options.num_micro_batches > 1 and graph.loss is not None:
        loss_of(graph)
    if options.stage_config is not None:
        stages, chunks, chunk_of = configured_stages(
            graph, options.stage_config, options.schedule, modules
        )
        # 1 is the default of the option, so that it may not have been requested.
        if options.stages not in (1, stages):
            raise StrategyError(
                f"stages={options.stages}, but stage_config has {stages} stages\n"
                "remove stages, or change stage_config"
            )
        _check_stages_and_micro_batches(options, stages)
    else:
        assert isinstance(options.stages, int)
        stages = options.stages
        _check_stages_and_micro_batches(options, stages)
        # V-shaped and interleaved schedules need several chunks per stage.
        chunks = SCHEDULES[options.schedule].min_chunks if stages > 1 else 1
        chunk_of = {}
    spec = PipelineSpec(
        stages,
        options.num_micro_batches,
        loss_reduction=loss_reduction,
        batch_dims=batch_dims,
        batch_norm=options.batch_norm,
    )
    # A single stage needs no schedule, so plans have the default schedule.
    if stages == 1:
        return spec
    return replace(spec, schedule=options.schedule, chunks=chunks, chunk_of=chunk_of)


def _check_stages_and_micro_batches(options: PlanOptions, stages: int) -> None:
    """Check that `stages` divides the devices, and that the schedule can run the micro-batches.

    Raises:
        StrategyError: if either is impossible; the message lists valid numbers.
    """
    devices, count = options.devices, options.num_micro_batches
    if devices % stages:
        valid = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise StrategyError(
            f"{devices} devices cannot be divided into {stages} stages of equal size\n"
            f"use one of these numbers of stages: {valid}"
        )
    # Also where the schedule has a fallback: that is for calls with smaller batches, not for plans.
    if count < stages:
        raise StrategyError(
            f"{count} micro-batches for {stages} stages: stages would stay idle\n"
            f"set micro_batches={stages} or more"
        )
    spec = PipelineSpec(stages, count, options.schedule)
    fewest = spec.schedule_spec.min_micro_batches(stages)
    if stages > 1 and count < fewest:
        raise StrategyError(
            f"{count} micro-batches for {stages} stages: schedule {options.schedule!r} needs"
            f" {fewest}\nset micro_batches={fewest} or more, or"
            f" schedule={spec.schedule_spec.fallback!r}"
        )
    if stages > 1 and not spec.can_run(count):
        valid_counts = [n for n in range(stages, 4 * count) if spec.can_run(n)]
        # The four nearest numbers, in ascending order.
        nearest = sorted(sorted(valid_counts, key=lambda n: abs(n - count))[:4])
        raise StrategyError(
            f"schedule {options.schedule!r} over {stages} stages cannot run {count} micro-batches"
            f" in rounds of equal length\nuse one of the nearest valid numbers:"
            f" {', '.join(map(str, nearest))}"
        )

"""`sw.Pipeline`, and the stages and micro-batches of a plan."""

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
from shardwright.core.search.assign_stages import StageConfig, named_stages
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError


class Pipeline(ModuleWrapper):
    """A model to be run in pipeline stages on micro-batches.

    It has the parameters, buffers and parameter names of `net`. `sw.plan` divides it into stages;
    before that, a call returns the loss that a planned step trains, on one device.

    Args:
        net: model that returns its loss.
        micro_batches: number of micro-batches per batch; at least the number of stages.
        stage_config: index of the stage of each module of `net`, by module name; by default the
            planner assigns stages.
        loss_reduction: `mean` for the loss of the whole batch, `sum` for the sum of the losses of
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
            raise StrategyError(f"Pipeline: `net` must be an nn.Module, not {net!r}")
        if not COUNT.accepts(micro_batches):
            raise StrategyError(COUNT.error("micro_batches", micro_batches))
        if loss_reduction not in REDUCTIONS:
            raise StrategyError(
                f"loss_reduction={loss_reduction!r}: must be one of {', '.join(REDUCTIONS)}"
            )
        self.micro_batches = micro_batches
        self.stage_config = None if stage_config is None else dict(stage_config)
        self.loss_reduction = loss_reduction
        self.wrap(net)

    @property
    def net(self) -> nn.Module:
        """The wrapped model."""
        return self._wrapped[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The reference that plans are compared with. The loss of the batch is no mean of those of
        # micro-batches where they divide by different numbers.
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
    """Return the options of `plan` with the micro-batches and stages of its `Pipeline`.

    Raises:
        StrategyError: if options and pipeline contradict each other.
    """
    # 1 is the default of the option, so it cannot be told from no request.
    if options.micro_batches not in (1, pipeline.micro_batches):
        raise StrategyError(
            f"micro_batches={options.micro_batches} contradicts Pipeline(net,"
            f" micro_batches={pipeline.micro_batches})\nremove one of the two"
        )
    if pipeline.stage_config is None:
        return replace(options, micro_batches=pipeline.micro_batches)
    if options.stage_config is not None:
        raise StrategyError(
            "stage_config is given twice, to plan and to Pipeline\nremove one of the two"
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
    """Build the pipeline of a captured model.

    Operators are assigned to chunks only if `stage_config` is given; otherwise `chunk_of` is empty,
    and stages are balanced after the search, which decides how long operators take.

    Args:
        modules: module names that are valid in `stage_config` although they have no operators.
        batch_dims: of each leaf of the call; empty for dimension 0.

    Raises:
        StrategyError: if the requested stages are invalid.
        PlanError: if the model returns several losses, as micro-batches train a single one.
    """
    # Called for its error: the model may return several losses.
    if options.num_micro_batches > 1 and graph.loss is not None:
        loss_of(graph)
    if options.stage_config is not None:
        stages, chunks, chunk_of = named_stages(
            graph, options.stage_config, options.schedule, modules
        )
        if options.stages not in (1, stages):
            raise StrategyError(
                f"stages={options.stages}, but stage_config has {stages} stages\n"
                "remove one of the two"
            )
        _check_pipeline_sizes(options, stages)
    else:
        assert isinstance(options.stages, int)
        stages = options.stages
        _check_pipeline_sizes(options, stages)
        # V-shaped and interleaved schedules need several chunks per stage.
        chunks = SCHEDULES[options.schedule].min_chunks if stages > 1 else 1
        chunk_of = {}
    count = options.num_micro_batches
    # Without stages there is nothing to schedule: the schedule keeps its default in plans.
    if stages == 1:
        return PipelineSpec(1, count, loss_reduction=loss_reduction, batch_dims=batch_dims)
    return PipelineSpec(
        stages, count, options.schedule, chunks, chunk_of, loss_reduction, batch_dims
    )


def _check_pipeline_sizes(options: PlanOptions, stages: int) -> None:
    """Check that the numbers of devices, stages and micro-batches suit each other.

    Raises:
        StrategyError: if they do not; names valid numbers.
    """
    devices, count = options.devices, options.num_micro_batches
    if devices % stages:
        valid = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise StrategyError(
            f"{devices} devices cannot be divided into {stages} stages of equal size\n"
            f"valid numbers of stages are {valid}"
        )
    if count < stages:
        raise StrategyError(
            f"{count} micro-batches for {stages} stages: stages would stay idle\n"
            f"set micro_batches={stages} or more"
        )
    spec = PipelineSpec(stages, count, options.schedule)
    if stages > 1 and not spec.can_run(count):
        near = [n for n in range(stages, 4 * count) if spec.can_run(n)]
        near = sorted(sorted(near, key=lambda n: abs(n - count))[:4])
        raise StrategyError(
            f"schedule {options.schedule!r} over {stages} stages cannot run {count} micro-batches"
            f" in rounds of equal length\nthe nearest valid numbers are {', '.join(map(str, near))}"
        )

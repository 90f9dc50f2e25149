"""A model that runs in pipeline stages, and its division into stages and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from shardwright.core.runtime.micro_batches import micro_batch
from shardwright.core.search.assign_stages import StageConfig, named_stages
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError


class Pipeline(ModuleWrapper):
    """A model that is to run in pipeline stages, micro-batch after micro-batch.

    It bears the parameters, buffers and names of the model. `sw.plan` divides it; called as it is,
    it runs the micro-batches one after the other on one device.

    Args:
        net: a model that returns its loss.
        micro_batches: pieces of the batch; at least as many as stages.
        stage_config: names of modules in `net`, each with the number of its stage; None leaves it
            to the planner.
        loss_reduction: `mean` makes the loss that of the whole batch; `sum` adds the losses of the
            micro-batches.

    Raises:
        StrategyError: for a value that is not valid.
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
            raise StrategyError(f"Pipeline takes a module, not {net!r}")
        if not COUNT.accepts(micro_batches):
            raise StrategyError(COUNT.error("micro_batches", micro_batches))
        if loss_reduction not in REDUCTIONS:
            raise StrategyError(
                f"loss_reduction={loss_reduction!r}: valid are {', '.join(REDUCTIONS)}"
            )
        self.micro_batches = micro_batches
        self.stage_config = None if stage_config is None else dict(stage_config)
        self.loss_reduction = loss_reduction
        self.wrap(net)

    @property
    def net(self) -> nn.Module:
        """The model inside."""
        return self._wrapped[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        results = []
        for number in range(self.micro_batches):
            piece = micro_batch(leaves, number, self.micro_batches)
            args_of_piece, kwargs_of_piece = pytree.tree_unflatten(piece, spec)
            results.append(self.net(*args_of_piece, **kwargs_of_piece))
        if not isinstance(results[0], torch.Tensor) or results[0].ndim:
            raise StrategyError(
                "a Pipeline is for a model that returns its loss, one number; for other outputs"
                " call the model itself"
            )
        total = torch.stack(results).sum()
        return total / self.micro_batches if self.loss_reduction == "mean" else total


def merged_options(options: PlanOptions, pipeline: Pipeline) -> PlanOptions:
    """The options of a call of `plan` with what its `Pipeline` says.

    Raises:
        StrategyError: if both say something else.
    """
    if options.micro_batches not in (1, pipeline.micro_batches):
        raise StrategyError(
            f"micro_batches={options.micro_batches}, but the Pipeline has"
            f" {pipeline.micro_batches}; give one of them"
        )
    if pipeline.stage_config is None:
        return replace(options, micro_batches=pipeline.micro_batches)
    if options.stage_config is not None:
        raise StrategyError("the Pipeline has a stage_config already; give one of them")
    return replace(
        options, micro_batches=pipeline.micro_batches, stage_config=pipeline.stage_config
    )


def micro_batch_example(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, micro_batches: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call for one micro-batch, of those for the whole batch.

    Raises:
        PlanError: if the batch cannot be split into so many micro-batches.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    leaves = micro_batch(leaves, 0, micro_batches)
    args_of_piece, kwargs_of_piece = pytree.tree_unflatten(leaves, spec)
    return args_of_piece, kwargs_of_piece


def pipeline_spec(
    options: PlanOptions, graph: Graph, modules: Iterable[str], loss_reduction: str
) -> PipelineSpec:
    """The stages of a captured model; which operators are in them only where modules are assigned,
    else they are to be divided evenly.

    Args:
        modules: names that are valid in `stage_config` besides those of modules with operators.

    Raises:
        StrategyError: if the stages cannot be as requested.
        PlanError: if the model returns several losses, of which micro-batches train one.
    """
    if options.num_micro_batches > 1 and graph.loss is not None:
        loss_of(graph)
    if options.stage_config is not None:
        stages, chunks, chunk_of = named_stages(
            graph, options.stage_config, options.schedule, modules
        )
        if options.stages not in (1, stages):
            raise StrategyError(
                f"stages={options.stages}, but stage_config names {stages}: remove one of them"
            )
        _check_numbers(options, stages)
    else:
        assert isinstance(options.stages, int)
        stages = options.stages
        _check_numbers(options, stages)
        chunks = SCHEDULES[options.schedule].min_chunks if stages > 1 else 1
        chunk_of = {}
    if stages == 1:
        return PipelineSpec(1, options.num_micro_batches, loss_reduction=loss_reduction)
    return PipelineSpec(
        stages, options.num_micro_batches, options.schedule, chunks, chunk_of, loss_reduction
    )


def _check_numbers(options: PlanOptions, stages: int) -> None:
    devices, count = options.devices, options.num_micro_batches
    if devices % stages:
        valid = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise StrategyError(
            f"{devices} devices cannot be divided into {stages} stages of equal size; valid"
            f" numbers of stages are {valid}"
        )
    if count < stages:
        raise StrategyError(
            f"{count} micro-batches for {stages} stages: stages would stay idle; give at least"
            f" micro_batches={stages}"
        )
    spec = PipelineSpec(stages, count, options.schedule)
    if stages > 1 and not spec.can_run(count):
        near = [n for n in range(stages, 4 * count) if spec.can_run(n)]
        near = sorted(sorted(near, key=lambda n: abs(n - count))[:4])
        raise StrategyError(
            f"{options.schedule} over {stages} stages cannot run {count} micro-batches in rounds"
            f" of equal length; nearest valid numbers are {', '.join(map(str, near))}"
        )

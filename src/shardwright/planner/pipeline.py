"""A model that runs in pipeline stages, and what is asked of its stages and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph
from shardwright.partition.pipeline_spec import AUTO, REDUCTIONS, PipelineSpec
from shardwright.partition.schedules import SCHEDULES, schedule_spec
from shardwright.runtime.micro_batches import micro_batch
from shardwright.search.assign_stages import StageConfig, balanced_stages, named_stages
from shardwright.torch_internals import pytree
from shardwright.torch_internals.modules import share_state


class Pipeline(nn.Module):
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
        _check_count("micro_batches", micro_batches)
        if loss_reduction not in REDUCTIONS:
            raise StrategyError(
                f"loss_reduction={loss_reduction!r}: valid are {', '.join(REDUCTIONS)}"
            )
        # In a tuple, so that it is no submodule: its parts are taken over under their own names.
        self._net = (net,)
        share_state(self, net)
        self.training = net.training
        self.micro_batches = micro_batches
        self.stage_config = None if stage_config is None else dict(stage_config)
        self.loss_reduction = loss_reduction

    @property
    def net(self) -> nn.Module:
        """The model that was given."""
        return self._net[0]

    def train(self, mode: bool = True) -> Pipeline:
        self.net.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        results = []
        for number in range(self.micro_batches):
            piece = micro_batch(leaves, number, self.micro_batches)
            mine, named_ones = pytree.tree_unflatten(piece, spec)
            results.append(self.net(*mine, **named_ones))
        if not isinstance(results[0], torch.Tensor) or results[0].ndim:
            raise StrategyError(
                "a Pipeline is for a model that returns its loss, one number; for other outputs"
                " call the model that it was made from"
            )
        total = torch.stack(results).sum()
        return total / self.micro_batches if self.loss_reduction == "mean" else total


@dataclass(frozen=True)
class PipelineRequest:
    """What a call of `plan` asks of stages and micro-batches.

    Args:
        stages, micro_batches, schedule, stage_config, max_stages, loss_reduction: see `plan` and
            `Pipeline`.
    """

    stages: int | Literal["auto"] = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    stage_config: StageConfig | None = None
    loss_reduction: str = "mean"
    max_stages: int | None = None

    def of(self, net: Any) -> tuple[Any, PipelineRequest]:
        """The model itself, and what is asked with what its `Pipeline` says.

        Raises:
            StrategyError: if both say something else, or a value is not valid.
        """
        if self.stages != AUTO:
            _check_count("stages", self.stages)
        if self.max_stages is not None:
            _check_count("max_stages", self.max_stages)
        _check_count("micro_batches", self.micro_batches)
        schedule_spec(self.schedule)
        named_stages = isinstance(net, Pipeline) and net.stage_config is not None
        if self.stages == AUTO and (named_stages or self.stage_config is not None):
            raise StrategyError("stages='auto', but stage_config names stages: give one of them")
        if not isinstance(net, Pipeline):
            return net, self
        if self.micro_batches not in (1, net.micro_batches):
            raise StrategyError(
                f"micro_batches={self.micro_batches}, but the Pipeline has {net.micro_batches};"
                " give one of them"
            )
        if self.stage_config is not None and net.stage_config is not None:
            raise StrategyError("the Pipeline has a stage_config already; give one of them")
        merged = replace(
            self,
            micro_batches=net.micro_batches,
            stage_config=self.stage_config if net.stage_config is None else net.stage_config,
            loss_reduction=net.loss_reduction,
        )
        return net.net, merged

    def example(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call for one micro-batch.

        Raises:
            PlanError: if the batch cannot be cut into so many micro-batches.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        leaves = micro_batch(leaves, 0, self.micro_batches)
        mine, named_ones = pytree.tree_unflatten(leaves, spec)
        return mine, named_ones

    def pipelining(self, graph: Graph, devices: int, modules: Iterable[str] = ()) -> PipelineSpec:
        """The stages of a captured model.

        Args:
            devices: of all stages together.
            modules: names that are valid in `stage_config` besides those of modules with operators.

        Raises:
            StrategyError: if the stages cannot be as asked.
        """
        if self.stage_config is not None:
            stages, chunks, chunk_of = named_stages(
                graph, self.stage_config, self.schedule, modules
            )
            if self.stages not in (1, stages):
                raise StrategyError(
                    f"stages={self.stages}, but stage_config names {stages}: leave out one of them"
                )
            self._check_numbers(stages, devices)
        else:
            assert isinstance(self.stages, int)
            stages = self.stages
            self._check_numbers(stages, devices)
            chunks = SCHEDULES[self.schedule].min_chunks if stages > 1 else 1
            chunk_of = balanced_stages(graph, stages * chunks) if stages > 1 else {}
        if stages == 1:
            return PipelineSpec(1, self.micro_batches, loss_reduction=self.loss_reduction)
        return PipelineSpec(
            stages, self.micro_batches, self.schedule, chunks, chunk_of, self.loss_reduction
        )

    def _check_numbers(self, stages: int, devices: int) -> None:
        if devices % stages:
            valid = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            raise StrategyError(
                f"{devices} devices cannot be divided into {stages} stages of equal size; valid"
                f" numbers of stages are {valid}"
            )
        count = self.micro_batches
        if count < stages:
            raise StrategyError(
                f"{count} micro-batches for {stages} stages: stages would stay idle; give at least"
                f" micro_batches={stages}"
            )
        asked = PipelineSpec(stages, count, self.schedule)
        if stages > 1 and not asked.can_run(count):
            near = [n for n in range(stages, 4 * count) if asked.can_run(n)]
            near = sorted(sorted(near, key=lambda n: abs(n - count))[:4])
            raise StrategyError(
                f"{self.schedule} over {stages} stages cannot run {count} micro-batches in rounds"
                f" of equal length; nearest valid numbers are {', '.join(map(str, near))}"
            )


def _check_count(what: str, given: Any) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise StrategyError(f"{what}={given!r}: must be a whole number of at least 1")

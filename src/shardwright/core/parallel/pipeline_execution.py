"""Execute this rank's chunks of a model in pipeline stages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.graph.split import assign_neighbors
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.lower.program import Program
from shardwright.core.misuse.partial_state import refuse_to_save_stage
from shardwright.core.misuse.stage_parameters import watch_stage
from shardwright.core.misuse.whole_batch import batch_sizes, output_batches
from shardwright.core.parallel.call import Call
from shardwright.core.parallel.execution import Execution
from shardwright.core.parallel.pipeline_stage import RankStages
from shardwright.core.parallel.tensor_places import TensorPlaces
from shardwright.core.parallel.train_step import StepInputs
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.clip_grad import clip_grad_norm_
from shardwright.core.runtime.dtensor import as_dtensor, stored_shards
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.modules import state_names
from shardwright.errors import PlanError


class PipelineExecution(Execution):
    """Runs the chunks of a model on stages of the running process group.

    Parameters and buffers that only other stages read are None. `train_step` runs forward and
    backward over all micro-batches. A call under `torch.no_grad()` returns full outputs on every
    rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch_parameters()
        refuse_to_save_stage(self.module, state_names(self.template))

    def of_copy(self, module: nn.Module, memo: dict[int, Any]) -> Execution:
        result = super().of_copy(module, memo)
        assert isinstance(result, PipelineExecution)
        result._watch_parameters()
        return result

    def _watch_parameters(self) -> None:
        stages = self.partitioned.stages_of_parameters
        watch_stage(self.module, self.template, stages, self.devices.stage)

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(module.program for module in self._planned_stages.modules)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            raise PlanError(
                "a model in pipeline stages has no gradients between calls\ntrain it with"
                " train_step(*args), which runs forward and backward; to evaluate it call it under"
                " torch.no_grad()"
            )
        bound, leaves = self._step_for(args, kwargs)
        stages = bound.step
        assert isinstance(stages, RankStages)
        parameters, buffers = bound.places.read()
        seed = self.random_seed + self.random_step
        inputs = StepInputs(stored_shards(parameters), buffers, leaves, seed)
        local_outputs, changed = stages.evaluate(inputs)
        bound.places.write(changed)
        graph = stages.partitioned.graph
        outputs = [
            self._whole(stages, leaf, local_outputs) if isinstance(leaf, Value) else leaf
            for leaf in graph.outputs
        ]
        if self.partitioned.decisions.arrivals:
            outputs = self._marked(outputs, graph, self._planned_call.arranged(args, kwargs))
        return pytree.tree_unflatten(outputs, graph.out_spec)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the norm of all gradients, over all devices and stages, to `max_norm`. A parameter
        that several stages own counts once.

        Returns:
            The norm before clipping, on every rank.
        """
        elsewhere = {
            name
            for name, stages in self.partitioned.stages_of_parameters.items()
            if min(stages) < self.devices.stage
        }
        dtype = next((v.stored_dtype for v in self.partitioned.graph.parameters), None)
        return clip_grad_norm_(
            self.module.named_parameters(), max_norm, self.devices, elsewhere, dtype
        )

    @property
    def _planned_stages(self) -> RankStages:
        count = self.partitioned.pipeline.micro_batches
        stages = self._train_steps[(*self._planned_situation, count)].step
        assert isinstance(stages, RankStages)
        return stages

    def _module_state(self) -> tuple[Hashable, Hashable, Hashable]:
        state = super()._module_state()
        if self._state.changed_buffers:
            raise PlanError(
                f"buffer {self._state.changed_buffers[0]!r}, on whose values shapes or branches of "
                "the model depend, has changed since the model was planned, which other pipeline "
                "stages do not see: plan and parallelize the model again"
            )
        return state

    def _bind_planned(self) -> None:
        key = (*self._planned_situation, self.partitioned.pipeline.micro_batches)
        self._train_steps[key] = self._bind_step(self.partitioned)

    def _make_step(self, partitioned: Partitioned) -> RankStages:
        stage = self.devices.stage
        for values in partitioned.tensors_of(stage):
            for name, parameter in TensorPlaces.of(self.module, values, ()).parameters.items():
                if parameter is None:
                    raise PlanError(
                        f"{name!r} is read in this mode by stage {stage}, which does not own it"
                    )
        return RankStages(partitioned, self._along(partitioned))

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], micro_batches: int = 1
    ) -> Partitioned:
        for name, parameter, trained, *_ in self._parameters_as_planned.all:
            if parameter.requires_grad is not trained:
                raise PlanError(
                    f"requires_grad of {name!r} has changed since the model was planned: with"
                    " pipeline stages, plan and parallelize the model again"
                )
        return super()._capture(args, kwargs, micro_batches)

    def _pipeline_of(self, graph: Graph) -> PipelineSpec:
        pipeline = self.partitioned.pipeline
        planned = pipeline.chunk_of
        chunk_of = {op.name: planned[op.name] for op in graph.ops if op.name in planned}
        return replace(pipeline, chunk_of=assign_neighbors(graph, chunk_of))

    def _marked(self, outputs: list[Any], graph: Graph, call: Call) -> list[Any]:
        """Mark outputs so that they refuse operators with this rank's part of the batch."""
        parts, spec = pytree.tree_flatten(call)
        whole = self._whole_leaves(parts, self._planned_call.planned_inputs(spec))
        sizes, name = batch_sizes(parts, whole), type(self.module).__name__
        batches = output_batches(name, graph.out_spec, sizes, self._gradients.watch)
        return [
            batch.mark(output) if batch is not None and isinstance(output, Tensor) else output
            for output, batch in zip(outputs, batches, strict=True)
        ]

    def _whole(
        self, stages: RankStages, value: Value, local_outputs: Mapping[str, list[Tensor]]
    ) -> Tensor:
        """Return an output for the whole batch on every rank.

        Tensors with the rows of the batch are concatenated, the loss and other means or sums over
        samples are reduced, and of others the first micro-batch's is taken.
        """
        partitioned = stages.partitioned
        chunk = next(c for c in partitioned.chunks if value.name in {v.name for v in c.returned})
        rows = [v.shape[0] for v in partitioned.graph.input_values if v.shape]
        joined = bool(value.shape) and bool(rows) and value.shape[0] == rows[0]
        joined = joined and stages.reduction_of(value) is None
        count = stages.micro_batches if joined else 1
        shape = (value.shape[0] * count, *value.shape[1:]) if joined else value.shape
        if chunk.stage == self.devices.stage:
            pieces = [
                self._gathered(stages, chunk, value, tensor) for tensor in local_outputs[value.name]
            ]
            weight = stages.reduction_of(value)
            if weight is not None:
                whole = torch.stack(pieces).sum(0) * weight
            else:
                whole = self._in_order(torch.cat(pieces), count) if joined else pieces[0]
            whole = whole.contiguous()
        else:
            whole = torch.empty(shape, dtype=value.dtype, device=self.devices.device)
        dist.broadcast(whole, group=self.devices.peers_of_all_stages, group_src=chunk.stage)
        return whole

    def _in_order(self, rows: Tensor, count: int) -> Tensor:
        """Restore the order of the batch's rows.

        Where each rank passes its own rows, a micro-batch has some rows of each rank.
        """
        arrivals = self.partitioned.decisions.arrivals.values()
        layouts = (TensorLayout(self.devices.matrix, axes) for axes in arrivals if axes)
        ranks = max((layout.shard_counts[0] for layout in layouts), default=1)
        if ranks == 1 or rows.shape[0] % (count * ranks):
            return rows
        pieces = rows.reshape(count, ranks, -1, *rows.shape[1:])
        return pieces.transpose(0, 1).reshape(rows.shape)

    def _gathered(self, stages: RankStages, chunk: Chunk, value: Value, tensor: Tensor) -> Tensor:
        axes = chunk.decisions.departures.get(value.name, ((),) * len(value.shape))
        where = TensorLayout(chunk.mesh, axes)
        if not where.sharded:
            return tensor
        like = torch.empty(value.shape, device="meta")
        return as_dtensor(tensor, like, where, stages.devices).full_tensor()

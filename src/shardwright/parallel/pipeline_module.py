"""The module that `parallelize` returns for a plan with pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.graph.graph import Value
from shardwright.graph.split import with_neighbors
from shardwright.layout.layout import TensorLayout
from shardwright.lower.program import Program
from shardwright.parallel.module import BoundProgram, ParallelModule, key_of, place_of, template_of
from shardwright.parallel.pipeline_stage import RankStages
from shardwright.partition.chunk import Chunk
from shardwright.partition.partitioned import Partitioned
from shardwright.runtime.clip_grad import clip_grad_norm_
from shardwright.runtime.devices import Devices
from shardwright.runtime.dtensor import (
    add_gradients,
    as_dtensor,
    stored_shards,
    with_stored_parameters,
)
from shardwright.runtime.micro_batches import micro_batch, most_micro_batches
from shardwright.torch_internals import pytree
from shardwright.torch_internals.tensors import copy_all_


@dataclass(frozen=True)
class BoundStages(BoundProgram):
    """This rank's parts, with the places in the module that they read and update."""

    stages: RankStages


class PipelineModule(ParallelModule):
    """A model whose parts run on stages of the running process group.

    It has the names of the model that it was made from; parameters and buffers that only other
    stages read are None. `train_step` runs forward and backward over all micro-batches; called
    under `torch.no_grad()`, it returns what the model returns, whole on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        template: nn.Module,
        partitioned: Partitioned,
        devices: Devices,
    ) -> None:
        super().__init__(module, template, partitioned, devices)
        count = partitioned.pipeline.micro_batches
        self._bound = {(*situation, count): bound for situation, bound in self._bound.items()}

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of this rank's parts, for the mode and the shapes of the plan."""
        planned = self._planned
        assert isinstance(planned, BoundStages)
        return tuple(module.program for module in planned.stages.modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise PlanError(
                "a model in pipeline stages has no gradients between calls: train it with"
                " train_step(*args), which runs forward and backward; to evaluate it call it under"
                " torch.no_grad()"
            )
        bound, leaves = self._bound_for(args, kwargs)
        shards, buffers = self._read(bound)
        kept, changed = bound.stages.evaluate(shards, buffers, leaves, self.seed + self.steps)
        self._write(bound, changed)
        outputs = [
            self._whole(bound.stages, leaf, kept) if isinstance(leaf, Value) else leaf
            for leaf in bound.graph.outputs
        ]
        return pytree.tree_unflatten(outputs, bound.graph.out_spec)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward over all micro-batches; gradients are in the parameters after it.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            PlanError: if the model returns no loss, or the batch cannot be cut as planned.
        """
        bound, leaves = self._bound_for(args, kwargs)
        if bound.graph.loss is None:
            raise PlanError("the model returns no loss, one number that a gradient starts from")
        shards, buffers = self._read(bound)
        self.steps += 1
        seed = self.seed + self.steps
        loss, gradients, changed = bound.stages.train(shards, buffers, leaves, seed)
        self._write(bound, changed)
        parameters = {name: getattr(owner, leaf) for name, owner, leaf in bound.parameters}
        add_gradients(parameters, gradients)
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over all devices and stages is at most
        `max_norm`; a parameter that several stages hold counts once.

        Returns:
            The norm before, on every rank.
        """
        planned = self._planned
        assert isinstance(planned, BoundStages)
        elsewhere = {
            name
            for name, stages in self.partitioned.stages_of_parameters.items()
            if min(stages) < self.devices.stage
        }
        dtype = next((v.stored_dtype for v in planned.graph.parameters), None)
        return clip_grad_norm_(self.named_parameters(), max_norm, self.devices, elsewhere, dtype)

    def _bound_for(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[BoundStages, list[Any]]:
        """The stages for the situation of a call, and its leaves on the device."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        count = most_micro_batches(leaves, self.partitioned.pipeline)
        piece = self._whole_leaves(micro_batch(leaves, 0, count))
        situation = (*self._situation(spec, [key_of(leaf) for leaf in piece]), count)
        if situation not in self._bound:
            mine, named_ones = pytree.tree_unflatten(piece, spec)
            captured = self._captured(mine, named_ones)
            pipeline = replace(captured.pipeline, micro_batches=count)
            self._bound[situation] = self._compiled(
                self._lowered(replace(captured, pipeline=pipeline))
            )
        bound = self._bound[situation]
        assert isinstance(bound, BoundStages)
        device = self.devices.device
        return bound, [x.to(device) if isinstance(x, Tensor) else x for x in leaves]

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partitioned:
        captured = super()._captured(args, kwargs)
        planned = captured.pipeline.chunk_of
        chunk_of = {op.name: planned[op.name] for op in captured.graph.ops if op.name in planned}
        chunk_of = with_neighbors(captured.graph, chunk_of)
        return replace(captured, pipeline=replace(captured.pipeline, chunk_of=chunk_of))

    def _lowered(self, partitioned: Partitioned) -> BoundStages:
        stages = RankStages(partitioned, self.devices)
        parameters, buffers = partitioned.tensors_of(self.devices.stage)
        for value in (*parameters, *buffers):
            _, owner, leaf = place_of(self, value)
            if getattr(owner, leaf) is None:
                raise PlanError(
                    f"{value.name!r} is read in this mode by stage {self.devices.stage}, which"
                    " does not hold it"
                )
        return BoundStages(
            partitioned.graph,
            stages.modules[0].program,
            tuple(place_of(self, value) for value in parameters),
            tuple(place_of(self, value) for value in buffers),
            stages,
        )

    def _compiled(self, bound: BoundProgram) -> BoundProgram:
        assert isinstance(bound, BoundStages)
        if self._compiler is None:
            return bound
        pipeline = self.partitioned.pipeline
        if pipeline.schedule_spec.splits_backward:
            raise PlanError(
                f"{pipeline.schedule} runs backward passes in two halves, which compiled programs"
                " do not have: compile a plan with another schedule"
            )
        for module in bound.stages.modules:
            function = self._compiler(module.program.function)
            module.program = replace(module.program, function=function)
        return bound

    def _read(self, bound: BoundProgram) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's shards of parameters, and its buffers, by name."""
        parameters = {n: getattr(owner, leaf) for n, owner, leaf in bound.parameters}
        return stored_shards(parameters), {
            n: getattr(owner, leaf) for n, owner, leaf in bound.buffers
        }

    def _write(self, bound: BoundProgram, changed: Mapping[str, Tensor]) -> None:
        if changed:
            places = {name: getattr(owner, leaf) for name, owner, leaf in bound.buffers}
            with torch.no_grad():
                copy_all_([places[name] for name in changed], list(changed.values()))

    def _whole(self, stages: RankStages, value: Value, kept: Mapping[str, list[Tensor]]) -> Tensor:
        """A value that the model returns, for the whole batch, on every rank: a tensor of the
        batch's rows is joined, the loss reduced, and of others the first micro-batch's is taken."""
        partitioned = stages.partitioned
        chunk = next(c for c in partitioned.chunks if value.name in {v.name for v in c.returned})
        rows = [v.shape[0] for v in partitioned.graph.input_values if v.shape]
        joined = bool(value.shape) and bool(rows) and value.shape[0] == rows[0]
        count = stages.micro_batches if joined else 1
        shape = (value.shape[0] * count, *value.shape[1:]) if joined else value.shape
        if chunk.stage == self.devices.stage:
            pieces = [self._gathered(chunk, value, tensor) for tensor in kept[value.name]]
            if value is partitioned.graph.loss:
                whole = stages.reduced(pieces)
            else:
                whole = self._in_order(torch.cat(pieces), count) if joined else pieces[0]
            whole = whole.contiguous()
        else:
            whole = torch.empty(shape, dtype=value.dtype, device=self.devices.device)
        dist.broadcast(whole, group=self.devices.across, group_src=chunk.stage)
        return whole

    def _in_order(self, rows: Tensor, count: int) -> Tensor:
        """The rows of the batch: where each rank is given its own part of it, each micro-batch has
        some of each rank's."""
        arrivals = self.partitioned.decisions.arrivals.values()
        layouts = (TensorLayout(self.devices.layout, axes) for axes in arrivals if axes)
        ranks = max((layout.shard_counts[0] for layout in layouts), default=1)
        if ranks == 1 or rows.shape[0] % (count * ranks):
            return rows
        pieces = rows.reshape(count, ranks, -1, *rows.shape[1:])
        return pieces.transpose(0, 1).reshape(rows.shape)

    def _gathered(self, chunk: Chunk, value: Value, tensor: Tensor) -> Tensor:
        axes = chunk.decisions.departures.get(value.name, ((),) * len(value.shape))
        where = TensorLayout(self.devices.layout, axes)
        if not where.sharded:
            return tensor
        like = torch.empty(value.shape, device="meta")
        return as_dtensor(tensor, like, where, self.devices).full_tensor()


def pipeline_module(
    module: nn.Module, partitioned: Partitioned, devices: Devices
) -> PipelineModule:
    """`module`, in stages as planned over `devices`."""
    graph = partitioned.graph
    of_stage = {v.name for values in partitioned.tensors_of(devices.stage) for v in values}
    used = {v.name for v in (*graph.parameters, *graph.buffers)}
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    # What no operator reads lies in the first stage.
    left_out = {n for n in names if n not in of_stage and (n in used or devices.stage)}
    stored = with_stored_parameters(module, partitioned.decisions.storage, devices, left_out)
    return PipelineModule(stored, template_of(module), partitioned, devices)

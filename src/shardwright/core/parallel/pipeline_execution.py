"""Execute calls of a model in pipeline stages on this rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.graph.split import assign_neighbors
from shardwright.core.lower.program import Program
from shardwright.core.misuse.manual_updates import ManualUpdates, manual_updates
from shardwright.core.misuse.partial_state import adapt_state_dicts_of_stage
from shardwright.core.misuse.stage_parameters import watch_optimizers_of_stages
from shardwright.core.parallel.execution import Execution, StepCall
from shardwright.core.parallel.pipeline_stage import RankStages
from shardwright.core.parallel.python_calls import ProgramResults
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.clip_grad import clip_grad_norm_
from shardwright.core.runtime.dtensor import stored_shards
from shardwright.core.runtime.total_norms import StageParameters, stage_models
from shardwright.core.torch_internals.modules import state_names
from shardwright.errors import PlanError


class PipelineExecution(Execution):
    """Runs the chunks of this rank's pipeline stage.

    Parameters and buffers that only other stages read cannot be used. `train_step` runs forward and
    backward over all micro-batches; a call under `torch.no_grad()` returns full outputs on every
    rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._register_parameters_of_stage()
        adapt_state_dicts_of_stage(self.module, state_names(self.template))

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> Execution:
        result = super().for_copy(module, memo)
        assert isinstance(result, PipelineExecution)
        result._register_parameters_of_stage()
        return result

    def _register_parameters_of_stage(self) -> None:
        parameters = StageParameters.of(
            self.module, self.template, self.stages_of_tensors, self.devices
        )
        stage_models()[self.module] = parameters
        # A step of the only rank of a rehearsal has no other to be compared with.
        if self.devices.is_distributed and has_other_ranks():
            manual_updates()[self.module] = ManualUpdates(parameters.parameters.values())
        watch_optimizers_of_stages()

    def train_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        updates = manual_updates().get(self.module)
        if updates is None:
            return super().train_step(args, kwargs)
        updates.before_call()
        loss = super().train_step(args, kwargs)
        updates.after_backward()
        return loss

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(module.program for module in self._planned_stages.modules)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The schedule interleaves forward and backward passes; a later `backward()` of the user
        # could not start those of other stages.
        if torch.is_grad_enabled():
            raise PlanError(
                "a model in pipeline stages cannot be called for a later backward pass\ntrain it"
                " with `net.train_step(*args)`, which runs forward and backward; evaluate it under"
                " `torch.no_grad()`"
            )
        self._reachable.update()
        step_call = self._get_or_capture_step(args, kwargs)
        graph, python = step_call.bound.step.partitioned.graph, step_call.bound.python
        if python is None:
            return graph.result(self._run_forward_of_stages(step_call, {}))

        # The captured Python rebuilds results of the user's own classes.
        def program(constants: Mapping[str, Tensor]) -> ProgramResults:
            return self._python.results(graph, self._run_forward_of_stages(step_call, constants))

        return self._python.run(python, program, step_call.call)

    def _run_forward_of_stages(
        self, step_call: StepCall, constants: Mapping[str, Tensor]
    ) -> list[Any]:
        """Run forward over all micro-batches, and return the outputs of the graph.

        Args:
            step_call: the step and its inputs.
            constants: current values of the graph's constants, by name.
        """
        bound, stages = step_call.bound, step_call.bound.step
        assert isinstance(stages, RankStages)
        graph = stages.partitioned.graph
        names = frozenset(value.name for value in graph.output_values)
        parameters, buffers = bound.tensors.read()
        # `random_step` does not advance: an evaluation must not change the dropout masks of later
        # steps.
        inputs = self._make_step_inputs(
            step_call, stored_shards(parameters), buffers, constants, names
        )
        with self._guard.explaining_errors(), self._caller_autocast.disabled():
            local_outputs, changed = stages.evaluate(inputs)
        self._guard.check_step()
        bound.tensors.write(changed)
        outputs = self._assemble_outputs(stages, local_outputs, names)
        return [outputs[leaf.name] if isinstance(leaf, Value) else leaf for leaf in graph.outputs]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm, over all devices and stages, to `max_norm`.

        Returns:
            The norm before clipping, on every rank.
        """
        # A parameter that several stages own, such as a tied embedding, counts on the first stage.
        counted_elsewhere = {
            name
            for name, stages in self.partitioned.stages_of_parameters.items()
            if min(stages) < self.devices.stage
        }
        # A stage without gradients must return the norm in the same dtype.
        dtype = next((v.stored_dtype for v in self.partitioned.graph.parameters), None)
        return clip_grad_norm_(
            self.module.named_parameters(), max_norm, self.devices, counted_elsewhere, dtype
        )

    @property
    def _planned_stages(self) -> RankStages:
        micro_batches = self.partitioned.pipeline.micro_batches
        stages = self._train_steps[(*self._planned_specialization, micro_batches)].step
        assert isinstance(stages, RankStages)
        return stages

    def _make_module_state_key(self) -> tuple[Hashable, Hashable, Hashable]:
        state = super()._make_module_state_key()
        # Before ranks compare calls: a rank sees only the parameters of its stage.
        for name, parameter, trained, *_ in self._parameters_as_planned.all:
            if parameter.requires_grad is not trained:
                raise PlanError(
                    f"`requires_grad` of {name!r} has changed since the model was planned in"
                    " pipeline stages\nrestore it, and leave the parameter out of the optimizer, or"
                    " set its `grad` to None before the step, while it is frozen"
                )
        if self._state.changed_buffers:
            raise PlanError(
                f"buffer {self._state.changed_buffers[0]!r} has changed since the model was "
                "planned, but shapes or branches of the model depend on its values\nplan and "
                "parallelize the model again"
            )
        return state

    def _cache_planned_program(self) -> None:
        key = (*self._planned_specialization, self.partitioned.pipeline.micro_batches)
        # Only as a step: a call without gradients runs the forward passes of the same stages.
        self._train_steps[key] = self._bind_train_step(self.partitioned)

    def _make_train_step(self, partitioned: Partitioned) -> RankStages:
        # On all ranks, as the other stages would wait for the one that raises the error.
        for stage in range(partitioned.pipeline.stages):
            for value in chain(*partitioned.tensors_of(stage)):
                if stage not in self.stages_of_tensors[value.name]:
                    raise self._make_error_of_unowned_tensor(partitioned.graph, stage, value)
        return RankStages(partitioned, self._make_program_devices(partitioned))

    def _make_error_of_unowned_tensor(self, graph: Graph, stage: int, value: Value) -> PlanError:
        owners = ", ".join(map(str, self.stages_of_tensors[value.name]))
        op = next((op for op, _ in graph.consumers[value]), None)
        line = f"{op.source}: " if op is not None and op.source else ""
        return PlanError(
            f"{line}in this call (training={self.module.training}), pipeline stage {stage} reads"
            f" {value.name!r}, which only stage {owners} stores, as the planned call does not read"
            " it there\nplan with one stage, or plan with a call that reads all parameters in the"
            " stages in which later calls read them"
        )

    def _adapt_pipeline_to_graph(self, graph: Graph) -> PipelineSpec:
        pipeline = self.partitioned.pipeline
        planned, chunks = pipeline.chunk_of, range(pipeline.num_chunks)
        anchors: dict[str, int] = {}
        preferred: dict[str, Sequence[int]] = {}
        for op in graph.ops:
            stages = self._stages_with_tensors(op)
            if op.name not in planned:
                # With its parameters if possible, else with its neighbors.
                preferred[op.name] = [c for c in chunks if pipeline.stage_of(c) in (stages or ())]
            elif stages is None:
                # A name such as `add_1` is another operator if the call skips modules.
                preferred[op.name] = [planned[op.name]]
            else:
                anchors[op.name] = planned[op.name]
        return replace(pipeline, chunk_of=assign_neighbors(graph, anchors, preferred))

    def _stages_with_tensors(self, op: Op) -> frozenset[int] | None:
        """Return the stages that store all parameters and buffers of `op`; None if it has none."""
        stored = [
            frozenset(self.stages_of_tensors[value.name])
            for value in op.inputs
            if value.name in self.stages_of_tensors
        ]
        return frozenset.intersection(*stored) if stored else None

"""A partitioned model: graph, mesh, decisions and pipeline, and the chunks derived from these.

Plan, cost, lowering and runtime receive the same object, so that they use the same chunks and the
same communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from weakref import WeakKeyDictionary

from shardwright.core.graph.graph import Graph, Origin, Value, WholeBatch
from shardwright.core.graph.split import GraphChunk, split_graph
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.decisions import CutAxes, Decisions
from shardwright.core.partition.local_outputs import local_outputs, outputs_without_samples
from shardwright.core.partition.pipeline_spec import ONE_STAGE, PipelineSpec
from shardwright.core.rules import is_random, rule_of
from shardwright.core.rules.rule import num_rules
from shardwright.errors import PlanError


@dataclass(frozen=True, eq=False)
class Partitioned:
    """A model partitioned over pipeline stages and over the devices of each stage.

    Args:
        graph: graph of one micro-batch.
        mesh: device matrix of one stage; the device matrices of all stages have the same shape.
        decisions: decisions for the full model.
        pipeline: stages, chunks and micro-batches.
    """

    graph: Graph
    mesh: DeviceMatrix
    decisions: Decisions
    pipeline: PipelineSpec = ONE_STAGE

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks in model order.

        A value is sent to the next chunk in the layout in which it is computed; a partial sum is
        first reduced to the layout in which its first consumer reads it. Each device sends to the
        device with the same coordinates in the device matrix of the next stage.

        Raises:
            PlanError: if the operators cannot be divided into the chunks of `pipeline`.
        """
        graph, mesh, decisions = self.graph, self.mesh, self.decisions
        self._check_parameter_updates()
        if self.pipeline.num_chunks == 1:
            # Each value once, although a model may return it twice.
            outputs = tuple(dict.fromkeys(graph.output_values))
            decisions = replace(decisions, local_outputs=self.local_outputs)
            return (Chunk(0, 0, graph, mesh, decisions, returned=outputs),)
        self._check_input_gradients()
        # Chunks repeat operators without a gradient instead of receiving their results, but no
        # random draws.
        graph_chunks = split_graph(graph, self.pipeline.chunk_of, random_operators(graph))
        boundary_layouts = {
            value.name: self._sharding_axes_when_sent(value)
            for graph_chunk in graph_chunks
            for value in graph_chunk.leaving
            # A chunk that passes a value on has a copy of it, as an input; its producer has the
            # value itself.
            if value in graph.producer
        }
        return tuple(
            self._build_chunk(number, graph_chunk, boundary_layouts)
            for number, graph_chunk in enumerate(graph_chunks)
        )

    @cached_property
    def local_outputs(self) -> dict[str, CutAxes]:
        """Mesh axes that shard each dimension of a local output, by output name.

        Each rank returns a local output only for the samples of its local batch.
        """
        return local_outputs(self.graph, self.decisions.arrivals)

    @cached_property
    def outputs_without_samples(self) -> frozenset[str]:
        """Names of the outputs that depend on no sample, if ranks pass local batches."""
        return outputs_without_samples(self.graph, self.decisions.arrivals)

    def chunks_of(self, stage: int) -> tuple[Chunk, ...]:
        """Return the chunks of the stage with index `stage`, in model order."""
        return tuple(chunk for chunk in self.chunks if chunk.stage == stage)

    @cached_property
    def stages_of_parameters(self) -> dict[str, tuple[int, ...]]:
        """Indices of the stages whose chunks read each parameter, by parameter name."""
        stages: dict[str, set[int]] = {}
        for chunk in self.chunks:
            for value in chunk.graph.parameters:
                stages.setdefault(value.name, set()).add(chunk.stage)
        return {name: tuple(sorted(numbers)) for name, numbers in stages.items()}

    @cached_property
    def shared_gradients(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(Indices of the stages, bytes of the gradient on one device) of each trained parameter
        that several stages read."""
        trained = {v.name: v for c in self.chunks for v in c.graph.parameters if v.requires_grad}
        shared = []
        # For example, the embedding in the first stage and the head in the last stage share a
        # weight.
        for name, stages in self.stages_of_parameters.items():
            if name in trained and len(stages) > 1:
                # All chunks have the storage of the full model, so that of the first chunk will do.
                stored = TensorLayout(self.mesh, self.chunks[0].decisions.storage[name])
                shard = prod(stored.shard_shape(trained[name].shape))
                shared.append((stages, shard * trained[name].stored_dtype.itemsize))
        return tuple(shared)

    def tensors_of(self, stage: int) -> tuple[list[Value], list[Value]]:
        """Return the parameters and the buffers that a stage reads or updates.

        Besides those of the stage's chunks, these are buffers that Python code on every rank reads,
        and the inputs of the prologue of a step if one of the chunks reads its results.
        """
        # Dicts as sets that keep the order of the graph; chunks of a stage may share a parameter.
        parameters: dict[Value, None] = {}
        buffers: dict[Value, None] = {}
        for chunk in self.chunks_of(stage):
            parameters |= dict.fromkeys(chunk.graph.parameters)
            buffers |= dict.fromkeys(chunk.graph.module_buffers)
        whole_batch, python = self.graph.whole_batch, self.graph.python
        outputs = () if python is None else python.outputs
        names = {output for output in outputs if isinstance(output, str)}
        if isinstance(whole_batch, WholeBatch) and whole_batch.prologue is not None:
            read = {value.name for chunk in self.chunks_of(stage) for value in chunk.graph.buffers}
            if not read.isdisjoint(whole_batch.names):
                names |= {value.name for value in whole_batch.prologue.buffers}
        buffers |= {value: None for value in self.graph.module_buffers if value.name in names}
        return list(parameters), list(buffers)

    @cached_property
    def shared_updates(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """(Updating stage, all stages with the buffer) of each updated buffer that several stages
        have, by name."""
        stages = range(self.pipeline.stages)
        names_of_stage = [{v.name for v in chain(*self.tensors_of(stage))} for stage in stages]
        shared = {}
        for chunk in self.chunks:
            for buffer, _ in chunk.graph.updates:
                owners = tuple(stage for stage in stages if buffer.name in names_of_stage[stage])
                if len(owners) > 1:
                    shared[buffer.name] = chunk.stage, owners
        return shared

    @cached_property
    def step_bytes(self) -> tuple[tuple[int, int], ...]:
        """Bytes that one device of each stage sends in a training step, (forward, backward).

        Counts redistributions, values sent to other stages, and gradients of parameters that
        several stages share.
        """
        chunks, micro_batches = self.chunks, self.pipeline.micro_batches
        sent_bytes = [[0, 0] for _ in range(self.pipeline.stages)]
        for chunk in chunks:
            forward, backward = chunk.communication.step_bytes(micro_batches)
            to_next, to_previous = chunk.border_bytes
            # Consecutive chunks of one stage pass values without sending them.
            if chunk.number + 1 < len(chunks) and chunks[chunk.number + 1].stage != chunk.stage:
                forward += micro_batches * to_next
            if chunk.number and chunks[chunk.number - 1].stage != chunk.stage:
                backward += micro_batches * to_previous
            sent_bytes[chunk.stage][0] += forward
            sent_bytes[chunk.stage][1] += backward
        for stages, num_bytes in self.shared_gradients:
            for stage in stages:
                # Ring all-reduce over n stages: 2 (n - 1) / n of the gradient, rounded up.
                sent_bytes[stage][1] += -(-2 * (len(stages) - 1) * num_bytes // len(stages))
        return tuple((forward, backward) for forward, backward in sent_bytes)

    def _check_parameter_updates(self) -> None:
        """Check that a trained parameter that `forward` updates is read once per step.

        The new value is written at the end of a call, so a second read of the parameter in the same
        step would differ from a step on one device.

        Raises:
            PlanError: if several chunks, micro-batches or gathers of `level3` would read an updated
                parameter.
        """
        sharding, pipeline = self.decisions.sharding, self.pipeline
        for value, _ in self.graph.updates:
            if value.origin is Origin.PARAMETER and (
                pipeline.num_chunks * pipeline.micro_batches > 1
                or (sharding is not None and sharding.level == "level3")
            ):
                raise PlanError(
                    f"parameter {value.name!r} is trained, and `forward` changes it without"
                    " autograd: the model cannot be planned with several stages or micro-batches,"
                    " or with `hsdp` level3\nuse one stage, one micro-batch and at most level2, or"
                    " change the parameter after the optimizer's step"
                )

    def _check_input_gradients(self) -> None:
        """Check that no input of the model requires a gradient.

        PyTorch's pipeline schedules return no gradients of model inputs.

        Raises:
            PlanError: if an input requires a gradient.
        """
        # Called only for several chunks: with one chunk autograd computes gradients of inputs.
        for value in self.graph.input_values:
            if value.differentiable:
                raise PlanError(
                    f"input {value.name!r} requires a gradient, which a model in pipeline stages"
                    f" does not return\npass `{value.name}.detach()`, or plan without stages"
                )

    def _build_chunk(
        self, number: int, graph_chunk: GraphChunk, boundary_layouts: dict[str, CutAxes]
    ) -> Chunk:
        graph, decisions = self.graph, self.decisions
        arrivals = {value.name: boundary_layouts[value.name] for value in graph_chunk.arriving}
        departures = {value.name: boundary_layouts[value.name] for value in graph_chunk.leaving}
        # Outputs besides the loss are returned as they are computed, as without stages; a chunk
        # without the loss would return them replicated by default.
        if graph.loss is not None:
            for value in graph_chunk.returned:
                if value is not graph.loss and value in graph.producer:
                    # An output that a later chunk reads keeps the layout in which it is sent.
                    departures.setdefault(value.name, self._sharding_axes_when_sent(value))
        chunk_decisions = replace(
            decisions,
            arrivals={**decisions.arrivals, **arrivals},
            departures={**decisions.departures, **departures},
        )
        return Chunk(
            number,
            self.pipeline.stage_of(number),
            graph_chunk.graph,
            self.mesh,
            chunk_decisions,
            graph_chunk.arriving,
            graph_chunk.leaving,
            graph_chunk.returned,
            self.pipeline.schedule_spec.splits_backward,
        )

    def _sharding_axes_when_sent(self, value: Value) -> CutAxes:
        """Return the axes that shard each dimension of a value while it is sent to the next
        chunk."""
        producer = self.graph.producer[value]
        index = producer.outputs.index(value)
        pinned_layouts = self.decisions.outputs.get(producer.name, ())
        axes = pinned_layouts[index] if index < len(pinned_layouts) else None
        if axes is not None:
            return axes
        # An operator without a rule computes full tensors on every device.
        rule = rule_of(producer)
        if rule is None:
            return ((),) * len(value.shape)
        _, outputs = rule.layouts(self.mesh, self.decisions.cuts.get(producer.name, {}))
        # A partial sum is reduced before it is sent, to the layout of its first consumer.
        return (
            self._sharding_axes_of_first_consumer(value)
            if outputs[index].partial
            else outputs[index].axes
        )

    def _sharding_axes_of_first_consumer(self, value: Value) -> CutAxes:
        """Return the axes that shard each dimension of a value as its first consumer with a
        sharding rule reads it; replicated if no consumer has a rule."""
        for consumer, index in self.graph.consumers[value]:
            rule = rule_of(consumer)
            if rule is not None:
                inputs, _ = rule.layouts(self.mesh, self.decisions.cuts.get(consumer.name, {}))
                return inputs[index].axes
        return ((),) * len(value.shape)


def random_operators(graph: Graph) -> frozenset[str]:
    """Return the names of the operators that draw random numbers."""
    # A rule that is registered later may say that its operator draws.
    num_rules_then, names = _CACHED_RANDOM.get(graph, (None, frozenset[str]()))
    if num_rules_then != num_rules():
        names = frozenset(op.name for op in graph.ops if is_random(op))
        _CACHED_RANDOM[graph] = num_rules(), names
    return names


_CACHED_RANDOM: WeakKeyDictionary[Graph, tuple[int, frozenset[str]]] = WeakKeyDictionary()
"""Number of rules, and the names of the random operators by these rules, of each graph; a search
partitions a graph thousands of times."""

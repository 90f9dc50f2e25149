"""Estimate the bytes of activations that autograd saves, without a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shardwright.core.cost.flops import is_view
from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.graph.saved_tensors import SavedTensors
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.transfer import Transfer

SavedBytes = dict[str, int]
"""Bytes on a device of the results that are saved for the backward pass, by the name of the
operator that computes them."""


class ActivationEstimate:
    """Estimates of the bytes of activations that autograd saves on a device.

    Args:
        saved: tensors that autograd saves for each operator, by operator name.
    """

    def __init__(
        self, graph: Graph, saved: dict[str, SavedTensors], mesh: DeviceMatrix, decisions: Decisions
    ) -> None:
        self.graph = graph
        self.saved = saved
        self._mesh, self._cuts = mesh, decisions.cuts
        self._roots: dict[Value, Value] = {}
        for op in graph.ops:
            if _output_is_view(op):
                viewed = op.inputs[0]
                # Producers come first, so that views of views end at the same tensor.
                self._roots[op.output] = self._roots.get(viewed, viewed)

    def saved_bytes(self, flow: Communication) -> SavedBytes:
        """Return the bytes saved for the backward pass, by operator name: inputs of recomputed
        segments, and tensors of operators outside of segments.

        Tensors that share memory count once.

        Args:
            flow: communication of the model, with the recomputed segments.
        """
        saved: SavedBytes = {}
        counted_keys: set[object] = set()
        for op_name, key, size in self._saved_tensors(flow):
            if key not in counted_keys:
                counted_keys.add(key)
                saved[op_name] = saved.get(op_name, 0) + size
        return saved

    def _saved_tensors(self, flow: Communication) -> Iterator[tuple[str, object, int]]:
        """Yield each tensor saved for the backward pass as (operator name, key, bytes on a device);
        tensors that share memory have equal keys."""
        first_ops = _first_consumer_by_transfer(self.graph, flow)
        for op in self.graph.ops:
            # Inside a segment `torch.utils.checkpoint` drops what autograd would save.
            segment = flow.segment_of.get(op.name)
            if segment is None:
                saved = self.saved[op.name]
                for index in saved.inputs:
                    yield from self._saved_tensor_of_input(op, index, flow, first_ops)
                for index in saved.outputs:
                    yield self._saved_tensor_of_result(op.outputs[index], flow)
                for index, (shape, dtype) in enumerate(saved.others):
                    size = (
                        prod(shape)
                        * dtype.itemsize
                        * self._local_fraction_of_saved_tensor(op, shape, flow)
                    )
                    yield op.name, (op.name, index), int(size)
                continue
            # Checkpointing saves the inputs of a segment, and within it the results of
            # redistributions that are not repeated.
            for index, value in enumerate(op.inputs):
                producer = self.graph.producer.get(value)
                is_inside = producer is not None and flow.segment_of.get(producer.name) is segment
                route = flow.routes[op.name, index]
                if not is_inside or (
                    # Most routes are empty.
                    route and not any(transfer.segment == segment.name for transfer in route)
                ):
                    yield from self._saved_tensor_of_input(op, index, flow, first_ops, segment.name)

    def _local_fraction_of_saved_tensor(
        self, op: Op, shape: Sequence[int], flow: Communication
    ) -> float:
        """Return the fraction on one device of a tensor that `op` saves besides inputs and outputs.

        The tensor, such as the softmax that a loss saves, is taken to be sharded like the output or
        else an input of equal shape. Without a tensor of equal shape, it is taken to be sharded
        like the output if that is at least as large, or else like the largest input. If the tensor
        is larger than that input, as the tensors that `experts` saves per token and expert, it is
        sharded over all axes that cut `op`.

        Args:
            shape: full shape of the tensor.
        """
        inputs = zip(op.inputs, flow.input_layouts[op.name], strict=True)
        layouts = [(op.output, flow.initial_layouts[op.output]), *inputs]
        same_shape = (each for each in layouts if tuple(each[0].shape) == tuple(shape))
        if (reference := next(same_shape, None)) is None:
            is_large = op.output.numel >= prod(shape)
            reference = layouts[0] if is_large else max(layouts, key=lambda each: each[0].numel)
        value, layout = reference
        if value.numel < prod(shape):
            return 1 / prod(map(self._mesh.size, self._cuts.get(op.name, {}).values()))
        # A tensor may be empty.
        return _local_numel(value, layout) / max(value.numel, 1)

    def _saved_tensor_of_input(
        self,
        op: Op,
        index: int,
        flow: Communication,
        first_ops: dict[Transfer, str],
        segment: str = "",
    ) -> Iterator[tuple[str, object, int]]:
        """Yield the tensor that is saved for an input of `op`, as (operator name, key, bytes).

        The tensor is the input before the redistributions that recomputing `segment` repeats.
        Yields nothing for parameters, nor for model inputs, buffers and constants without
        redistribution, as saving these takes no memory.
        """
        # Parameters are stored anyway, and saving one takes no memory.
        value = op.inputs[index]
        if value.origin is Origin.PARAMETER:
            return
        route = [t for t in flow.routes[op.name, index] if t.segment != segment or not segment]
        sending = [transfer for transfer in route if transfer.forward_bytes]
        if sending:
            yield (
                # Consumers of one transfer share its result, which is saved once.
                first_ops[sending[-1]],
                sending[-1],
                _local_numel(value, route[-1].step.target) * value.itemsize,
            )

        elif value.origin is Origin.ACTIVATION:
            yield self._saved_tensor_of_result(value, flow)

    def _saved_tensor_of_result(self, value: Value, flow: Communication) -> tuple[str, object, int]:
        """Return the tensor that is saved for an activation, as (operator name, key, bytes).

        For a view, the saved tensor is the base of the view.
        """
        root = self._roots.get(value, value)
        producer = self.graph.producer.get(root)
        if producer is None:
            # A view of an input, a buffer or a parameter, whose memory exists anyway.
            return "", root, 0
        return producer.name, root, _local_numel(root, flow.initial_layouts[root]) * root.itemsize


def _first_consumer_by_transfer(graph: Graph, flow: Communication) -> dict[Transfer, str]:
    """Return the name of the first operator that reads the result of each redistribution step."""
    first_ops: dict[Transfer, str] = {}
    for op in graph.ops:
        for index in range(len(op.inputs)):
            for transfer in flow.routes[op.name, index]:
                # Operators come in graph order, so the first entry stays.
                first_ops.setdefault(transfer, op.name)
    return first_ops


def _output_is_view(op: Op) -> bool:
    return bool(op.inputs) and len(op.outputs) == 1 and is_view(op)


def _local_numel(value: Value, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(value.shape))

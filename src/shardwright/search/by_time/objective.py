"""What cuts cost altogether, with the conversions as they will be made over all axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.cost.step_time import TimeModel
from shardwright.layout.layout import TensorLayout
from shardwright.layout.redistribution import redistribution_steps
from shardwright.rules.rule import Cuts, no_reductions
from shardwright.search.by_time.problem import OpVariable, SearchProblem, TensorEdge


@dataclass(frozen=True, slots=True)
class ObjectiveCost:
    """Seconds of one micro-batch and of one step, and the bytes of parameters that are kept.

    Args:
        forward, backward: computation.
        conversions: of activations, both ways.
        gathers: of parameters that are stored sharded, once a step.
        gradients: reductions of gradients, and conversions of parameters, once a step.
        update: the optimizer's.
        kept: bytes.
    """

    forward: float = 0.0
    backward: float = 0.0
    conversions: float = 0.0
    gathers: float = 0.0
    gradients: float = 0.0
    update: float = 0.0
    kept: float = 0.0

    def __add__(self, other: ObjectiveCost) -> ObjectiveCost:
        return self.plus(other, 1)

    def plus(self, other: ObjectiveCost, times: float) -> ObjectiveCost:
        return ObjectiveCost(
            self.forward + times * other.forward,
            self.backward + times * other.backward,
            self.conversions + times * other.conversions,
            self.gathers + times * other.gathers,
            self.gradients + times * other.gradients,
            self.update + times * other.update,
            self.kept + times * other.kept,
        )

    def total(self, micro_batches: int, kept: float, overlaps: bool = True) -> float:
        """Seconds of a step, and `kept` seconds for each byte that is kept.

        Args:
            overlaps: whether parameters are gathered beside the forward pass, and gradients reduced
                beside the backward pass.
        """
        busy = micro_batches * (self.forward + self.backward + self.conversions)
        exposed = self.exposed if overlaps else self.gathers + self.gradients
        return busy + exposed + self.update + kept * self.kept

    @property
    def exposed(self) -> float:
        """What computation does not hide of the communication once a step."""
        return max(0.0, self.gathers - self.forward) + max(0.0, self.gradients - self.backward)


class Objective:
    """Costs of operators and of values for given cuts; equal ones once."""

    def __init__(self, network: SearchProblem, model: TimeModel) -> None:
        self.network = network
        self.model = model
        self._operators: dict[object, ObjectiveCost] = {}
        self._streams: dict[object, ObjectiveCost] = {}
        self._layouts: dict[object, tuple[tuple[TensorLayout, ...], tuple[TensorLayout, ...]]] = {}

    def cost(self, cuts: Sequence[Cuts]) -> ObjectiveCost:
        """Of all nodes cut so, each as often as it occurs."""
        total = ObjectiveCost()
        for node, cut in zip(self.network.nodes, cuts, strict=True):
            total = total.plus(self.operator(node, cut), node.count)
        for stream in self.network.streams:
            total = total.plus(self.stream(stream, cuts), stream.count)
        return total

    def operator(self, node: OpVariable, cuts: Cuts) -> ObjectiveCost:
        """Of one operator by itself, with the parameters that only it reads."""
        key = (id(node), tuple(cuts.items()))
        if key not in self._operators:
            self._operators[key] = self._operator(node, cuts)
        return self._operators[key]

    def _operator(self, node: OpVariable, cuts: Cuts) -> ObjectiveCost:
        forward, backward = self.model.operator(node.op, cuts)
        inside = 0.0
        if node.rule is not None and node.rule.reductions is not no_reductions:
            parts = node.rule.shard_counts(self.model.mesh, cuts)
            for reduction in node.rule.reductions(node.op, parts):
                axes = tuple(axis for f in reduction.factors for axis in cuts.get(f, ()))
                inside += sum(self.model.inside(reduction, axes, node.differentiable))
        total = ObjectiveCost(forward, backward, inside)
        read, _ = self.layouts(node, cuts)
        for place in node.own:
            value, layout = node.op.inputs[place], read[place]
            parts_of_value = self.model.mesh.size(layout.sharded)
            kept = value.numel * value.stored_dtype.itemsize / parts_of_value
            gathers = gradients = update = 0.0
            if value.requires_grad:
                update = self.model.update_of(kept, parts_of_value)
                varying = tuple(layout.varying) if node.differentiable else ()
                used = {*layout.sharded, *varying}
                whole = tuple(a for a in range(len(self.model.mesh.device_matrix)) if a not in used)
                sent = value.numel * value.itemsize / parts_of_value
                gathers, gradients = self.model.parameter(varying, whole, sent)
            total += ObjectiveCost(gathers=gathers, gradients=gradients, update=update, kept=kept)
        return total

    def layouts(
        self, node: OpVariable, cuts: Cuts
    ) -> tuple[tuple[TensorLayout, ...], tuple[TensorLayout, ...]]:
        """How a node reads its inputs and makes its outputs."""
        key = (id(node.rule) if node.rule is not None else id(node), tuple(cuts.items()))
        if key not in self._layouts:
            if node.rule is not None:
                self._layouts[key] = node.rule.layouts(self.model.mesh, cuts)
            else:
                whole = self.model.mesh.replicated
                self._layouts[key] = (
                    tuple(whole(len(value.shape)) for value in node.op.inputs),
                    tuple(whole(len(value.shape)) for value in node.op.outputs),
                )
        return self._layouts[key]

    def stream(self, stream: TensorEdge, cuts: Sequence[Cuts]) -> ObjectiveCost:
        """Of one value: its conversions, and where several operators read a parameter, that."""
        key, made, reads = self._between(stream, cuts)
        if key not in self._streams:
            self._streams[key] = self._stream(stream, made, reads)
        return self._streams[key]

    @property
    def priced(self) -> int:
        """How many values were priced, between how they are made and read."""
        return len(self._streams)

    def known(self, stream: TensorEdge, cuts: Sequence[Cuts]) -> ObjectiveCost | None:
        """What `stream` gives, if it was asked for before."""
        return self._streams.get(self._between(stream, cuts)[0])

    def _between(
        self, stream: TensorEdge, cuts: Sequence[Cuts]
    ) -> tuple[object, TensorLayout, list[TensorLayout]]:
        """How a value is made and read, and a key that says so."""
        nodes = self.network.nodes
        reads = [self.layouts(nodes[node], cuts[node])[0][place] for node, place in stream.readers]
        made = self._made(stream, cuts, reads)
        if stream.returned:
            reads.append(self.model.mesh.replicated(len(stream.value.shape)))
        return (id(stream), made, frozenset(reads)), made, reads

    def _made(
        self, stream: TensorEdge, cuts: Sequence[Cuts], reads: Sequence[TensorLayout]
    ) -> TensorLayout:
        mesh = self.model.mesh
        if stream.stored:
            axes = next((read.axes for read in reads if read.sharded), None)
            return TensorLayout(mesh, axes) if axes else mesh.replicated(len(stream.value.shape))
        if stream.made is not None:
            return TensorLayout(mesh, stream.made)
        if stream.source is None:
            return mesh.replicated(len(stream.value.shape))
        number, slot = stream.source
        return self.layouts(self.network.nodes[number], cuts[number])[1][slot]

    def _stream(
        self, stream: TensorEdge, made: TensorLayout, reads: Sequence[TensorLayout]
    ) -> ObjectiveCost:
        value, seconds = stream.value, 0.0
        known: set[object] = set()
        for target in reads:
            path = redistribution_steps(made, target, value.shape, stream.differentiable)
            for length, step in enumerate(path, start=1):
                if path[:length] not in known:
                    known.add(path[:length])
                    seconds += sum(self.model.step(step, value, stream.differentiable))
        if not stream.stored:
            return ObjectiveCost(conversions=seconds)
        parts = self.model.mesh.size(made.sharded)
        kept = value.numel * value.stored_dtype.itemsize / parts
        update = self.model.update_of(kept, parts) if value.requires_grad else 0.0
        return ObjectiveCost(gradients=seconds, update=update, kept=kept)

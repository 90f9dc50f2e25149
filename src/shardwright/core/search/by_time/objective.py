"""What cuts cost altogether, with the redistributions as they will be made over all axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwright.core.cost.step_time import TimeModel
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.rules.rule import Cuts, no_reductions
from shardwright.core.search.by_time.least_redistribution import LeastRedistribution
from shardwright.core.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.core.search.cut_moves import OpLayouts, layouts_of


@dataclass(frozen=True, slots=True)
class ObjectiveCost:
    """Seconds of one micro-batch and of one step, and the bytes of parameters that are kept.

    Args:
        forward, backward: computation.
        redistributions: of activations, both ways.
        gathers: of parameters that are stored sharded, once a step.
        gradients: reductions of gradients, and redistributions of parameters, once a step.
        update: the optimizer's.
        parameter_bytes: bytes.
    """

    forward: float = 0.0
    backward: float = 0.0
    redistributions: float = 0.0
    gathers: float = 0.0
    gradients: float = 0.0
    update: float = 0.0
    parameter_bytes: float = 0.0

    def __add__(self, other: ObjectiveCost) -> ObjectiveCost:
        return self.plus(other, 1)

    def plus(self, other: ObjectiveCost, times: float) -> ObjectiveCost:
        return ObjectiveCost(
            self.forward + times * other.forward,
            self.backward + times * other.backward,
            self.redistributions + times * other.redistributions,
            self.gathers + times * other.gathers,
            self.gradients + times * other.gradients,
            self.update + times * other.update,
            self.parameter_bytes + times * other.parameter_bytes,
        )

    def total(self, micro_batches: int, parameter_bytes: float, slowdown: float = 0.0) -> float:
        """Seconds of a step, and `parameter_bytes` seconds for each byte that is kept.

        Args:
            slowdown: of parameters that are gathered beside the forward pass and gradients that are
                reduced beside the backward pass, the share that counts even so.
        """
        busy = micro_batches * (self.forward + self.backward + self.redistributions)
        exposed = self.exposed + slowdown * (self.gathers + self.gradients - self.exposed)
        return busy + exposed + self.update + parameter_bytes * self.parameter_bytes

    @property
    def exposed(self) -> float:
        """What computation does not hide of the communication once a step."""
        return max(0.0, self.gathers - self.forward) + max(0.0, self.gradients - self.backward)


Total = Callable[[ObjectiveCost], float]
"""What counts of a cost altogether."""


class Objective:
    """Costs of operators and of values for given cuts; equal ones once."""

    def __init__(self, problem: SearchProblem, model: TimeModel) -> None:
        self.problem = problem
        self.model = model
        self._operators: dict[object, ObjectiveCost] = {}
        self._edges: dict[object, ObjectiveCost] = {}
        self._layouts: dict[object, OpLayouts] = {}
        self._least = LeastRedistribution(model.links)

    def cost(self, cuts: Sequence[Cuts]) -> ObjectiveCost:
        """Of all variables cut so, each as often as it occurs."""
        total = ObjectiveCost()
        for variable, cut in zip(self.problem.variables, cuts, strict=True):
            total = total.plus(self.operator(variable, cut), variable.count)
        for edge in self.problem.edges:
            total = total.plus(self.edge(edge, cuts), edge.count)
        return total

    def cost_below(self, cuts: Sequence[Cuts], total: Total, bound: float) -> ObjectiveCost | None:
        """The cost of all variables cut so; None if its total is not below `bound`."""
        alone = ObjectiveCost()
        for variable, cut in zip(self.problem.variables, cuts, strict=True):
            alone = alone.plus(self.operator(variable, cut), variable.count)
        return self.added(alone, self.problem.edges, cuts, total, bound)

    def added(
        self,
        rest: ObjectiveCost,
        edges: Iterable[TensorEdge],
        cuts: Sequence[Cuts],
        total: Total,
        bound: float,
    ) -> ObjectiveCost | None:
        """`rest` and these values; None if that is not below `bound`. Finding redistributions takes
        longest, so none are looked for where what they take at least is already too much."""
        unpriced: list[tuple[float, TensorEdge]] = []
        for edge in edges:
            cost, priced = self.at_least(edge, cuts)
            if priced:
                rest = rest.plus(cost, edge.count)
            else:
                unpriced.append((edge.count * cost.redistributions, edge))
        waiting = sum(least for least, _ in unpriced)
        for least, edge in sorted(unpriced, key=lambda each: -each[0]):
            if total(rest.plus(ObjectiveCost(redistributions=waiting), 1)) >= bound:
                return None
            rest = rest.plus(self.edge(edge, cuts), edge.count)
            waiting -= least
        return rest if total(rest) < bound else None

    def operator(self, variable: OpVariable, cuts: Cuts) -> ObjectiveCost:
        """Of one operator by itself, with the parameters that only it reads."""
        key = (id(variable), tuple(cuts.items()))
        if key not in self._operators:
            self._operators[key] = self._operator(variable, cuts)
        return self._operators[key]

    def _operator(self, variable: OpVariable, cuts: Cuts) -> ObjectiveCost:
        forward, backward = self.model.operator(variable.op, cuts)
        inside = 0.0
        if variable.rule is not None and variable.rule.reductions is not no_reductions:
            parts = variable.rule.shard_counts(self.model.mesh, cuts)
            for reduction in variable.rule.reductions(variable.op, parts):
                axes = tuple(axis for f in reduction.factors for axis in cuts.get(f, ()))
                beside = forward, backward
                inside += sum(self.model.inside(reduction, axes, variable.differentiable, beside))
        total = ObjectiveCost(forward, backward, inside)
        read, _ = self.layouts(variable, cuts)
        for place in variable.own_parameters:
            value, layout = variable.op.inputs[place], read[place]
            parts_of_value = self.model.mesh.size(layout.sharded)
            parameter_bytes = value.numel * value.stored_dtype.itemsize / parts_of_value
            gathers = gradients = update = 0.0
            if value.requires_grad:
                update = self.model.update_of(parameter_bytes, parts_of_value)
                varying = tuple(layout.varying) if variable.differentiable else ()
                used = {*layout.sharded, *varying}
                whole = tuple(a for a in range(len(self.model.mesh.device_matrix)) if a not in used)
                sent = value.numel * value.itemsize / parts_of_value
                gathers, gradients = self.model.parameter(varying, whole, sent)
            total += ObjectiveCost(
                gathers=gathers, gradients=gradients, update=update, parameter_bytes=parameter_bytes
            )
        return total

    def layouts(self, variable: OpVariable, cuts: Cuts) -> OpLayouts:
        """How an operator that is cut so reads its inputs and leaves its outputs."""
        key = (id(variable.rule or variable), tuple(cuts.items()))
        if key not in self._layouts:
            self._layouts[key] = layouts_of(variable.op, variable.rule, self.model.mesh, cuts)
        return self._layouts[key]

    def edge(self, edge: TensorEdge, cuts: Sequence[Cuts]) -> ObjectiveCost:
        """Of one value: its redistributions, and where several operators read a parameter, that."""
        key, source, reads = self._between(edge, cuts)
        if key not in self._edges:
            self._edges[key] = self._edge(edge, source, reads)
        return self._edges[key]

    def at_least(self, edge: TensorEdge, cuts: Sequence[Cuts]) -> tuple[ObjectiveCost, bool]:
        """The cost of `edge` and whether it was priced before; if not, what its redistributions
        take at least: what readers share is no less than what one of them needs."""
        key, source, reads = self._between(edge, cuts)
        known = self._edges.get(key)
        if known is not None:
            return known, True
        if edge.is_shared_parameter:
            return ObjectiveCost(), False
        num_bytes = edge.value.numel * edge.value.itemsize
        back, least = edge.differentiable, self._least
        seconds = max(least.seconds(source, read, num_bytes, back) for read in reads)
        return ObjectiveCost(redistributions=seconds), False

    @property
    def priced(self) -> int:
        """How many edges were priced, each between one layout and a set of others."""
        return len(self._edges)

    def _between(
        self, edge: TensorEdge, cuts: Sequence[Cuts]
    ) -> tuple[object, TensorLayout, list[TensorLayout]]:
        """A key, the layout in which a value is left, and those in which it is read."""
        variables = self.problem.variables
        reads = [self.layouts(variables[n], cuts[n])[0][place] for n, place in edge.readers]
        source = self._source(edge, cuts, reads)
        if edge.returned:
            reads.append(self.model.mesh.replicated(len(edge.value.shape)))
        return (id(edge), source, frozenset(reads)), source, reads

    def _source(
        self, edge: TensorEdge, cuts: Sequence[Cuts], reads: Sequence[TensorLayout]
    ) -> TensorLayout:
        mesh = self.model.mesh
        if edge.is_shared_parameter:
            axes = next((read.axes for read in reads if read.sharded), None)
            return TensorLayout(mesh, axes) if axes else mesh.replicated(len(edge.value.shape))
        return self.source_layout(edge, cuts[edge.source[0]] if edge.source is not None else {})

    def source_layout(self, edge: TensorEdge, cuts: Cuts) -> TensorLayout:
        """The layout in which the source of an edge leaves its value if it is cut so."""
        if edge.fixed_axes is not None:
            return TensorLayout(self.model.mesh, edge.fixed_axes)
        assert edge.source is not None
        number, output_index = edge.source
        return self.layouts(self.problem.variables[number], cuts)[1][output_index]

    def _edge(
        self, edge: TensorEdge, source: TensorLayout, reads: Sequence[TensorLayout]
    ) -> ObjectiveCost:
        value, seconds = edge.value, 0.0
        known: set[object] = set()
        for target in reads:
            path = redistribution_steps(source, target, value.shape, edge.differentiable)
            for length, step in enumerate(path, start=1):
                if path[:length] not in known:
                    known.add(path[:length])
                    seconds += sum(self.model.step(step, value, edge.differentiable))
        if not edge.is_shared_parameter:
            return ObjectiveCost(redistributions=seconds)
        parts = self.model.mesh.size(source.sharded)
        parameter_bytes = value.numel * value.stored_dtype.itemsize / parts
        update = self.model.update_of(parameter_bytes, parts) if value.requires_grad else 0.0
        seconds *= self.model.parameter_weight
        return ObjectiveCost(gradients=seconds, update=update, parameter_bytes=parameter_bytes)

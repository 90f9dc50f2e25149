"""The objective of the search by time, formula (1) of `core.search`, over all axes at once.

Redistributions count with the steps that the lowered program runs, whereas the tables of one axis
(`axis_tables`) add the seconds of each axis separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwright.core.cost.time_model import TimeModel
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.rules.rule import Cuts, no_reductions
from shardwright.core.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.core.search.by_time.redistribution_bound import RedistributionBound
from shardwright.core.search.nearby_cuts import OpLayouts, layouts_of


@dataclass(frozen=True, slots=True)
class ObjectiveCost:
    """Components of the search objective (formula (1) of `core.search`), for an operator, a value
    or the full model.

    Args:
        forward, backward: seconds of computation per micro-batch (F, W).
        redistributions: seconds of redistributing activations and gradients per micro-batch (R).
        gathers: seconds of gathering sharded parameters per step (Ga).
        gradients: seconds of reducing gradients and redistributing parameters per step (Gr).
        update: seconds of the optimizer's update per step (U).
        parameter_bytes: bytes of parameters on one device (K).
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
        """Return this cost plus `times * other`, component by component."""
        return ObjectiveCost(
            self.forward + times * other.forward,
            self.backward + times * other.backward,
            self.redistributions + times * other.redistributions,
            self.gathers + times * other.gathers,
            self.gradients + times * other.gradients,
            self.update + times * other.update,
            self.parameter_bytes + times * other.parameter_bytes,
        )

    def total(
        self, micro_batches: int, parameter_byte_seconds: float, slowdown: float = 0.0
    ) -> float:
        """Return the search objective in seconds: step time plus weighted parameter memory (T in
        formula (1) of `core.search`).

        Args:
            parameter_byte_seconds: weight of one byte of parameters, in seconds.
            slowdown: fraction of the overlapped communication that counts as exposed, because it
                slows down the computation that it overlaps.
        """
        micro_batch_seconds = micro_batches * (self.forward + self.backward + self.redistributions)
        # What is not exposed overlaps computation, and slows it down.
        exposed = self.exposed + slowdown * (self.gathers + self.gradients - self.exposed)
        return (
            micro_batch_seconds
            + exposed
            + self.update
            + parameter_byte_seconds * self.parameter_bytes
        )

    @property
    def exposed(self) -> float:
        """Exposed seconds of gathering parameters and reducing their gradients (E in formula (1) of
        `core.search`)."""
        return max(0.0, self.gathers - self.forward) + max(0.0, self.gradients - self.backward)


Total = Callable[[ObjectiveCost], float]
"""Function to minimize, which maps an `ObjectiveCost` to seconds."""


class Objective:
    """Cached costs of operators, edges and the full model for given cuts."""

    def __init__(self, problem: SearchProblem, model: TimeModel) -> None:
        self.problem = problem
        self.model = model
        self._operators: dict[object, ObjectiveCost] = {}
        self._edges: dict[object, ObjectiveCost] = {}
        self._layouts: dict[object, OpLayouts] = {}
        self._redistribution_bound = RedistributionBound(model.links)

    def cost(self, cuts: Sequence[Cuts]) -> ObjectiveCost:
        """Return the cost of all operators and edges of the model.

        Args:
            cuts: the axes of each factor of each variable.
        """
        cost = ObjectiveCost()
        for variable, op_cuts in zip(self.problem.variables, cuts, strict=True):
            cost = cost.plus(self.operator(variable, op_cuts), variable.count)
        for edge in self.problem.edges:
            cost = cost.plus(self.edge(edge, cuts), edge.count)
        return cost

    def cost_below(self, cuts: Sequence[Cuts], total: Total, bound: float) -> ObjectiveCost | None:
        """Return the cost of the model, or None if the objective is at least `bound` seconds.

        Args:
            cuts: the axes of each factor of each variable.
        """
        # Costs of operators need no search for steps, so that they are exact from the start.
        op_costs = ObjectiveCost()
        for variable, op_cuts in zip(self.problem.variables, cuts, strict=True):
            op_costs = op_costs.plus(self.operator(variable, op_cuts), variable.count)
        return self.add_edges(op_costs, self.problem.edges, cuts, total, bound)

    def add_edges(
        self,
        base: ObjectiveCost,
        edges: Iterable[TensorEdge],
        cuts: Sequence[Cuts],
        total: Total,
        bound: float,
    ) -> ObjectiveCost | None:
        """Return `base` plus the cost of `edges`, or None if the objective is at least `bound`.

        Searching for redistribution steps takes most of the time of a search. So edges without a
        cached cost start at a lower bound, and their costs are computed one by one, the largest
        bound first, until the objective reaches `bound`.

        Args:
            cuts: the axes of each factor of each variable.
            total: function from an `ObjectiveCost` to the seconds to minimize.
            bound: seconds that the objective must be below.
        """
        # A bound above the best total discards a candidate without the cost of any edge.
        bounded_edges: list[tuple[float, TensorEdge]] = []
        for edge in edges:
            cost, is_cached = self.lower_bound(edge, cuts)
            if is_cached:
                base = base.plus(cost, edge.count)
            else:
                bounded_edges.append((edge.count * cost.redistributions, edge))
        # Bounds of all edges whose cost is not computed yet.
        bound_seconds = sum(edge_bound for edge_bound, _ in bounded_edges)
        # The largest bound first: its cost is most likely to lift the total above `bound`.
        for edge_bound, edge in sorted(bounded_edges, key=lambda each: -each[0]):
            if total(base.plus(ObjectiveCost(redistributions=bound_seconds), 1)) >= bound:
                return None
            base = base.plus(self.edge(edge, cuts), edge.count)
            bound_seconds -= edge_bound
        return base if total(base) < bound else None

    def operator(self, variable: OpVariable, cuts: Cuts) -> ObjectiveCost:
        """Return the cost of one operator and of the parameters that only this operator reads."""
        # Equal cuts in another order of factors are computed again, but not wrongly.
        key = (id(variable), tuple(cuts.items()))
        if key not in self._operators:
            self._operators[key] = self._operator_cost(variable, cuts)
        return self._operators[key]

    def _operator_cost(self, variable: OpVariable, cuts: Cuts) -> ObjectiveCost:
        forward, backward = self.model.operator_seconds(variable.op, cuts)
        reduction_seconds = 0.0
        if variable.rule is not None and variable.rule.reductions is not no_reductions:
            shard_counts = variable.rule.shard_counts(self.model.mesh, cuts)
            for reduction in variable.rule.reductions(variable.op, shard_counts):
                axes = tuple(axis for f in reduction.factors for axis in cuts.get(f, ()))
                computation = forward, backward
                reduction_seconds += sum(
                    self.model.inner_collective_seconds(
                        reduction, axes, variable.differentiable, computation
                    )
                )
        # Collectives inside kernels count as redistributions, since each micro-batch repeats them.
        cost = ObjectiveCost(forward, backward, reduction_seconds)
        input_layouts, _ = self.layouts(variable, cuts)
        for input_index in variable.own_parameters:
            value, layout = variable.op.inputs[input_index], input_layouts[input_index]
            num_shards = self.model.mesh.size(layout.sharded)
            parameter_bytes = value.numel * value.stored_dtype.itemsize / num_shards
            gathers = gradients = update = 0.0
            if value.requires_grad:
                update = self.model.parameter_update_seconds(parameter_bytes, num_shards)
                # Without a backward pass there is no gradient to reduce.
                reduce_axes = tuple(layout.varying) if variable.differentiable else ()
                used_axes = {*layout.sharded, *reduce_axes}
                # ZeRO shards over axes over which every use is replicated: those that neither cut
                # the parameter nor leave its gradient partial.
                gather_axes = tuple(
                    a for a in range(len(self.model.mesh.device_matrix)) if a not in used_axes
                )
                # Gathered and reduced in the dtype of use, which may differ from that of storage.
                shard_bytes = value.numel * value.itemsize / num_shards
                gathers, gradients = self.model.parameter_seconds(
                    reduce_axes, gather_axes, shard_bytes
                )
            cost += ObjectiveCost(
                gathers=gathers, gradients=gradients, update=update, parameter_bytes=parameter_bytes
            )
        return cost

    def layouts(self, variable: OpVariable, cuts: Cuts) -> OpLayouts:
        """Return the layouts of an operator's inputs and those of its outputs under `cuts`."""
        # `rule_of` returns one object for equal operators, which have equal layouts.
        key = (id(variable.rule or variable), tuple(cuts.items()))
        if key not in self._layouts:
            self._layouts[key] = layouts_of(variable.op, variable.rule, self.model.mesh, cuts)
        return self._layouts[key]

    def edge(self, edge: TensorEdge, cuts: Sequence[Cuts]) -> ObjectiveCost:
        """Return the cost of redistributing the value of an edge and, for a shared parameter, of
        storing it."""
        key, source, targets = self._layouts_of_edge(edge, cuts)
        if key not in self._edges:
            self._edges[key] = self._edge_cost(edge, source, targets)
        return self._edges[key]

    def lower_bound(self, edge: TensorEdge, cuts: Sequence[Cuts]) -> tuple[ObjectiveCost, bool]:
        """Return the cost of `edge` if it is cached, else a lower bound; and whether it is cached.

        Consumers may share redistribution steps, so the bound is the maximum, not the sum, of the
        bounds of single consumers.
        """
        key, source, targets = self._layouts_of_edge(edge, cuts)
        cached = self._edges.get(key)
        if cached is not None:
            return cached, True
        # Its seconds count as `gradients`, which `add_edges` does not bound; 0 is a bound too.
        if edge.is_shared_parameter:
            return ObjectiveCost(), False
        # In the dtype of use: activations are redistributed as they are computed.
        num_bytes = edge.value.numel * edge.value.itemsize
        seconds = max(
            self._redistribution_bound.seconds(source, target, num_bytes, edge.differentiable)
            for target in targets
        )
        return ObjectiveCost(redistributions=seconds), False

    @property
    def num_cached_edges(self) -> int:
        """Number of combinations of an edge and its layouts whose cost is cached."""
        return len(self._edges)

    def _layouts_of_edge(
        self, edge: TensorEdge, cuts: Sequence[Cuts]
    ) -> tuple[object, TensorLayout, list[TensorLayout]]:
        """Return a cache key of `edge`, the layout of its value before redistribution, and the
        layouts to which the value is redistributed."""
        variables = self.problem.variables
        targets = [
            self.layouts(variables[n], cuts[n])[0][input_index] for n, input_index in edge.consumers
        ]
        source = self._initial_or_stored_layout(edge, cuts, targets)
        if edge.returned:
            targets.append(self.model.mesh.replicated(len(edge.value.shape)))
        # The order of targets does not matter for the cost, since consumers share steps.
        return (id(edge), source, frozenset(targets)), source, targets

    def _initial_or_stored_layout(
        self, edge: TensorEdge, cuts: Sequence[Cuts], targets: Sequence[TensorLayout]
    ) -> TensorLayout:
        mesh = self.model.mesh
        if edge.is_shared_parameter:
            # Stored as the first consumer that shards it reads it; the others redistribute from
            # there.
            axes = next((layout.axes for layout in targets if layout.sharded), None)
            return TensorLayout(mesh, axes) if axes else mesh.replicated(len(edge.value.shape))
        return self.initial_layout(
            edge, cuts[edge.producer[0]] if edge.producer is not None else {}
        )

    def initial_layout(self, edge: TensorEdge, cuts: Cuts) -> TensorLayout:
        """Return the layout in which a value is computed or passed in.

        Args:
            cuts: the axes of each factor of the producer; ignored where the layout is fixed.
        """
        if edge.fixed_axes is not None:
            return TensorLayout(self.model.mesh, edge.fixed_axes)
        assert edge.producer is not None
        index, output_index = edge.producer
        return self.layouts(self.problem.variables[index], cuts)[1][output_index]

    def _edge_cost(
        self, edge: TensorEdge, source: TensorLayout, targets: Sequence[TensorLayout]
    ) -> ObjectiveCost:
        value, seconds = edge.value, 0.0
        counted_paths: set[object] = set()
        for target in targets:
            path = redistribution_steps(source, target, value.shape, edge.differentiable)
            for length, step in enumerate(path, start=1):
                # Consumers share the first steps of their paths, as the lowered program runs them
                # once.
                if path[:length] not in counted_paths:
                    counted_paths.add(path[:length])
                    seconds += sum(self.model.step_seconds(step, value, edge.differentiable))
        if not edge.is_shared_parameter:
            return ObjectiveCost(redistributions=seconds)
        num_shards = self.model.mesh.size(source.sharded)
        parameter_bytes = value.numel * value.stored_dtype.itemsize / num_shards
        update = (
            self.model.parameter_update_seconds(parameter_bytes, num_shards)
            if value.requires_grad
            else 0.0
        )
        # A `mem_coeff` below the default favors replicated parameters
        # (`TimedStep.parameter_weight`).
        seconds *= self.model.parameter_weight
        return ObjectiveCost(gradients=seconds, update=update, parameter_bytes=parameter_bytes)

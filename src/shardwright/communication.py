"""All that a plan communicates: for each value the steps from where it is made to where it is read.

Search and cost read it to know the bytes, lowering reads it to emit the steps; that both read the
same list is why a prediction is exact.

Consumers of one value share steps: `q`, `k` and `v` read one replicated → varying step, whose
gradient is one all-reduce. All-reduces of parameters' gradients over the same devices are joined
into buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.conversion import Step, steps
from shardwright.decided import Decided, Storage
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.layout import Layout, TensorLayout
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts, Reduction


@dataclass(eq=False)
class Transfer:
    """One conversion step of a value, made once for all its consumers.

    Args:
        before: the transfer whose result this one converts; None if it starts at the value itself.
        differentiable: whether a gradient comes back through it from any consumer.
    """

    value: Value
    step: Step
    before: Transfer | None
    differentiable: bool

    @property
    def forward_bytes(self) -> int:
        """Bytes that one device sends in the forward pass."""
        return self.step.forward_bytes(self.value.shape, self.value.itemsize)

    @property
    def backward_bytes(self) -> int:
        """Bytes that one device sends for the gradient."""
        if not self.differentiable:
            return 0
        return self.step.backward_bytes(self.value.shape, self.value.itemsize)


@dataclass(frozen=True)
class Bucket:
    """Replicated → varying steps of parameters whose gradients are all-reduced together."""

    axes: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    def backward_bytes(self, mesh: Layout) -> int:
        size = mesh.size(self.axes)
        total = sum(_local_bytes(t.value, t.step.target) for t in self.transfers)
        return -(-2 * (size - 1) * total // size)


@dataclass(frozen=True)
class InnerReduction:
    """An all-reduce inside an operator's kernel, over the joined `axes`."""

    reduction: Reduction
    axes: tuple[int, ...]

    def bytes(self, mesh: Layout, differentiable: bool) -> tuple[int, int]:
        """Bytes that one device sends, forward and backward."""
        size, numel = mesh.size(self.axes), 1
        for extent in self.reduction.shape:
            numel *= extent
        once = -(-2 * (size - 1) * numel * self.reduction.dtype.itemsize // size)
        back = self.reduction.varying and self.reduction.differentiable and differentiable
        return once, once if back else 0


@dataclass
class Communication:
    """What a plan communicates.

    Args:
        made: the layout in which each value is made, stored (parameters) or arrives (inputs).
        left: the transfers of a value whose operator is told how to leave it; all its routes begin
            with them.
        read: for each operator the layouts in which it reads its inputs.
        routes: for each input of an operator, `(operator name, index)`, the transfers on the way.
        output_routes: for each of the graph's output values the transfers to what is returned.
        update_routes: likewise for the new values of buffers.
        reductions: all-reduces inside kernels, by operator name.
        buckets: gradient all-reduces of parameters, joined.
    """

    mesh: Layout
    made: dict[Value, TensorLayout] = field(default_factory=dict)
    left: dict[Value, tuple[Transfer, ...]] = field(default_factory=dict)
    read: dict[str, tuple[TensorLayout, ...]] = field(default_factory=dict)
    routes: dict[tuple[str, int], tuple[Transfer, ...]] = field(default_factory=dict)
    output_routes: dict[Value, tuple[Transfer, ...]] = field(default_factory=dict)
    update_routes: dict[Value, tuple[Transfer, ...]] = field(default_factory=dict)
    reductions: dict[str, tuple[InnerReduction, ...]] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    transfers: list[Transfer] = field(default_factory=list)
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one training step."""
        return self.forward_bytes + self.backward_bytes

    def layout(self, value: Value) -> TensorLayout:
        """The layout in which consumers find `value`: as made, or as its operator leaves it."""
        route = self.left.get(value)
        return route[-1].step.target if route else self.made[value]


def communication(graph: Graph, mesh: Layout, decided: Decided) -> Communication:
    """Every conversion between the layouts that `decided` asks for.

    The model's inputs arrive whole on every device unless they are said to arrive cut; its loss is
    left replicated, and other outputs too if there is no loss, else they stay in the layout in
    which they are made, unless their departure is said.
    """
    result = Communication(mesh)
    for value in (*graph.input_values, *graph.buffers, *graph.constants):
        whole = ((),) * len(value.shape)
        result.made[value] = TensorLayout(mesh, tuple(decided.arrivals.get(value.name, whole)))
    for value in graph.parameters:
        whole = ((),) * len(value.shape)
        result.made[value] = TensorLayout(mesh, tuple(decided.storage.get(value.name, whole)))
    shared: dict[tuple[Value, tuple[Step, ...]], Transfer] = {}
    for op in graph.ops:
        _operator(result, op, decided.cuts.get(op.name, {}), shared)
        for value, axes in zip(op.outputs, decided.outputs.get(op.name, ()), strict=False):
            if axes is not None:
                way = TensorLayout(mesh, axes)
                result.left[value] = _route(result, value, way, shared, True)
    for value in graph.output_values:
        departure = decided.departures.get(value.name)
        ends = departure is not None or graph.loss is None or value is graph.loss
        target = mesh.replicated(len(value.shape)) if ends or not value.shape else None
        if departure is not None:
            target = TensorLayout(mesh, departure)
        found = target or result.layout(value)
        result.output_routes[value] = _route(result, value, found, shared, ends)
    for _, value in graph.updates:
        target = mesh.replicated(len(value.shape))
        result.update_routes[value] = _route(result, value, target, shared, False)
    result.buckets = _buckets(result.transfers, decided.bucket_bytes)
    _count(result, graph)
    return result


def as_used(graph: Graph, mesh: Layout, cuts: Mapping[str, Cuts]) -> Storage:
    """Stores each parameter sharded as its first sharding use reads it, else replicated."""
    storage: dict[str, tuple[tuple[int, ...], ...]] = {}
    for op in graph.ops:
        found = rule_of(op)
        if found is None:
            continue
        inputs, _ = found.layouts(mesh, cuts.get(op.name, {}))
        for value, layout in zip(op.inputs, inputs, strict=True):
            if value.kind is Kind.PARAMETER and layout.sharded:
                storage.setdefault(value.name, layout.axes)
    for value in graph.parameters:
        storage.setdefault(value.name, ((),) * len(value.shape))
    return storage


def _operator(
    result: Communication,
    op: Op,
    cuts: Cuts,
    shared: dict[tuple[Value, tuple[Step, ...]], Transfer],
) -> None:
    mesh, found = result.mesh, rule_of(op)
    if found is None:
        inputs = tuple(mesh.replicated(len(value.shape)) for value in op.inputs)
        outputs = tuple(mesh.replicated(len(value.shape)) for value in op.outputs)
    else:
        inputs, outputs = found.layouts(mesh, cuts)
        inner = []
        for reduction in found.reductions(op, found.parts(mesh, cuts)):
            axes = tuple(sorted(a for f in reduction.factors for a in cuts.get(f, ())))
            inner.append(InnerReduction(reduction, axes))
        if inner:
            result.reductions[op.name] = tuple(inner)
    result.read[op.name] = inputs
    for value, layout in zip(op.outputs, outputs, strict=True):
        result.made[value] = layout
    differentiable = any(value.requires_grad for value in op.outputs)
    for index, (value, layout) in enumerate(zip(op.inputs, inputs, strict=True)):
        result.routes[op.name, index] = _route(result, value, layout, shared, differentiable)


def _route(
    result: Communication,
    value: Value,
    target: TensorLayout,
    shared: dict[tuple[Value, tuple[Step, ...]], Transfer],
    differentiable: bool,
) -> tuple[Transfer, ...]:
    """The transfers of `value` to `target`; those that exist already are taken over.

    `differentiable` says of this consumer whether it sends a gradient back.
    """
    differentiable = differentiable and value.requires_grad
    path = steps(result.layout(value), target, value.shape, differentiable)
    route = list(result.left.get(value, ()))
    for length, step in enumerate(path, start=1):
        key = (value, path[:length])
        if key not in shared:
            before = route[-1] if route else None
            shared[key] = Transfer(value, step, before, differentiable)
            result.transfers.append(shared[key])
        shared[key].differentiable |= differentiable
        route.append(shared[key])
    return tuple(route)


def _buckets(transfers: list[Transfer], limit: int) -> tuple[Bucket, ...]:
    """Joins the gradient all-reduces of parameters by devices and dtype, in the order of use."""
    open_buckets: dict[tuple[object, ...], list[Transfer]] = {}
    filled: dict[tuple[object, ...], int] = {}
    closed: list[Bucket] = []

    def close(key: tuple[object, ...]) -> None:
        group = open_buckets.pop(key)
        closed.append(Bucket(group[0].step.axes, tuple(group)))

    for transfer in transfers:
        first = transfer.before is None and transfer.step.kind == "vary"
        if not (first and transfer.value.kind is Kind.PARAMETER):
            continue
        key: tuple[object, ...] = (transfer.step.axes, transfer.value.dtype)
        size = _local_bytes(transfer.value, transfer.step.target)
        if key in open_buckets and filled[key] + size > limit:
            close(key)
        if key not in open_buckets:
            open_buckets[key], filled[key] = [], 0
        open_buckets[key].append(transfer)
        filled[key] += size
    for key in tuple(open_buckets):
        close(key)
    return tuple(closed)


def _local_bytes(value: Value, layout: TensorLayout) -> int:
    numel = 1
    for extent in layout.shard_shape(value.shape):
        numel *= extent
    return numel * value.itemsize


def _count(result: Communication, graph: Graph) -> None:
    bucketed = {id(t) for bucket in result.buckets for t in bucket.transfers}
    for transfer in result.transfers:
        result.forward_bytes += transfer.forward_bytes
        if id(transfer) not in bucketed:
            result.backward_bytes += transfer.backward_bytes
    for bucket in result.buckets:
        result.backward_bytes += bucket.backward_bytes(result.mesh)
    for name, inner in result.reductions.items():
        differentiable = any(value.requires_grad for value in graph.by_name[name].outputs)
        for reduction in inner:
            forward, backward = reduction.bytes(result.mesh, differentiable)
            result.forward_bytes += forward
            result.backward_bytes += backward

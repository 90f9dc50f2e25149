"""What the user's strategies fix before any search starts: the mesh, cuts, outputs and storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from shardwright.core.constraints.parse import (
    StrategyParser,
    axes_on_mesh,
    divisors,
    first_axes,
    mesh_of,
)
from shardwright.core.constraints.strategy import Entry, OperatorStrategy, entries_text, entry_text
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes, prime_factors
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.decisions import Storage
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts
from shardwright.errors import StrategyError

OutputAxes = tuple[tuple[Axes, ...] | None, ...]
"""For each output the axes that cut each dimension; None where the search is free to choose."""


@dataclass(frozen=True)
class ResolvedConstraints:
    """The decisions of a plan that the user has made.

    Args:
        mesh: the device matrix, in which all layouts of the user can be expressed.
        cuts: of every pinned operator; `{}` for a replicated one. The bias of a pinned operator is
            cut like the output that it is added to.
        outputs: the output axes of the operators that have an out_strategy.
    """

    mesh: DeviceMatrix
    cuts: dict[str, Cuts]
    outputs: dict[str, OutputAxes]


def resolve(
    graph: Graph,
    devices: int,
    strategies: Mapping[str, OperatorStrategy],
    parameters: Mapping[str, Entry],
    nodes: Iterable[int] = (),
) -> ResolvedConstraints:
    """Resolves strategies to cuts on a common device matrix.

    Args:
        strategies: by name of the operator.
        parameters: the requested storage of parameters; here only its layouts matter, which the
            device matrix must be able to express.
        nodes: how many neighboring devices each level of links joins, as `mesh_of` takes them.

    Raises:
        StrategyError: if an operator cannot be sharded as requested; the message names the
            operator, its shapes and what is valid.
        LayoutError: if a layout has another number of devices, or no device matrix can express all.
    """
    layouts = [(name, layout) for name, s in strategies.items() for layout in s.layouts]
    layouts += [(name, e) for name, e in parameters.items() if isinstance(e, TensorLayout)]
    mesh = mesh_of(devices, layouts, nodes)
    cuts: dict[str, Cuts] = {}
    outputs: dict[str, OutputAxes] = {}
    for name, strategy in strategies.items():
        op = graph.by_name[name]
        parser = StrategyParser(op, _in_captured_shapes(op, strategy, mesh), mesh)
        cuts[name] = parser.cuts()
        if (output_axes := requested_outputs(parser, cuts[name])) is not None:
            outputs[name] = output_axes
    for name in strategies:
        bias = graph.by_name.get(f"{name}.bias")
        if bias is not None and bias.inputs[0] is graph.by_name[name].output:
            output = outputs.get(name, (None,))[0]
            axes = _output_axes(graph.by_name[name], mesh, cuts[name]) if output is None else output
            cuts.setdefault(bias.name, _cuts_for_first_input(bias, axes))
    return ResolvedConstraints(mesh, cuts, outputs)


def _in_captured_shapes(op: Op, strategy: OperatorStrategy, mesh: DeviceMatrix) -> OperatorStrategy:
    """The same shards of tensors whose leading dimensions are one in the user's code, and apart in
    the graph."""

    def entry_of(value: Value, entry: Entry) -> Entry:
        dims = entry.axes if isinstance(entry, TensorLayout) else entry
        if entry is None or not dims or len(dims) != len(value.shape) - op.flattened + 1:
            return entry
        lead = value.shape[: op.flattened]
        if isinstance(entry, TensorLayout):
            first, *rest = axes_on_mesh(op.name, entry, mesh)
            axes = _dealt_out(lead, first, [mesh.device_matrix[axis] for axis in first])
            return TensorLayout(mesh, (*map(tuple, axes), *rest))
        primes = prime_factors(entry[0])
        return (*map(prod, _dealt_out(lead, primes, primes)), *entry[1:])

    def entries(values: Sequence[Value], requested: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return (*map(entry_of, values, requested), *requested[len(values) :])

    outputs = strategy.outputs
    if op.flattened == 1:
        return strategy
    return OperatorStrategy(
        entries(op.inputs, strategy.inputs),
        None if outputs is None else entries(op.outputs, outputs),
    )


def _dealt_out(shape: Sequence[int], axes: Iterable[int], sizes: Iterable[int]) -> list[list[int]]:
    """Each of `axes` goes to the outermost dimension that its size still divides, or to the
    last."""
    left, parts = list(shape), [list[int]() for _ in shape]
    for axis, size in zip(axes, sizes, strict=True):
        dim = next((dim for dim, rest in enumerate(left) if rest % size == 0), len(left) - 1)
        left[dim] //= size
        parts[dim].append(axis)
    return parts


def _output_axes(op: Op, mesh: DeviceMatrix, cuts: Cuts) -> tuple[Axes, ...]:
    """The axes that cut the output of a pinned operator once its partial sum is all-reduced."""
    rule = rule_of(op)
    assert rule is not None
    return rule.layouts(mesh, cuts)[1][0].axes


def _cuts_for_first_input(op: Op, axes: tuple[Axes, ...]) -> dict[str, Axes]:
    """The cuts with which an operator reads its first input cut by `axes`."""
    rule = rule_of(op)
    assert rule is not None
    factors = zip(rule.inputs[0], axes, strict=True)
    return {f: cut for f, cut in factors if f is not None and f in rule.factors and cut}


def requested_storage(
    graph: Graph, mesh: DeviceMatrix, parameters: Mapping[str, Entry], used: Storage
) -> dict[str, tuple[Axes, ...]]:
    """How every parameter is stored: as requested by the user, otherwise as it is `used`.

    Raises:
        StrategyError: if a parameter cannot be sharded as requested.
    """
    stored = {name: tuple(axes) for name, axes in used.items()}
    for value in graph.parameters:
        if value.name in parameters:
            where, entry = f"parameter {value.name}", parameters[value.name]
            used_axes = stored[value.name]
            stored[value.name] = cut_axes(where, "parameter_plan", value, entry, mesh, used_axes)
    return stored


def requested_outputs(parser: StrategyParser, cuts: Cuts) -> OutputAxes | None:
    """The output axes that out_strategy requests; None if the operator has none.

    An output can stay as the operator computes it. A partial sum is all-reduced, or
    reduce-scattered onto any dimensions, whose innermost axes the axes of the sum then become.

    Raises:
        StrategyError: if an output cannot get the requested layout; the message lists those that it
            can get.
    """
    op, entries = parser.op, parser.strategy.outputs
    if entries is None:
        return None
    if len(entries) != len(op.outputs):
        raise parser.error(
            f"out_strategy {entries_text(entries)} has {len(entries)} entries for"
            f" {len(op.outputs)} outputs"
        )
    _, computed = parser.rule.layouts(parser.mesh, cuts)
    return tuple(
        None if entry is None else _requested_axes(parser, index, entry, computed[index])
        for index, entry in enumerate(entries)
    )


def _requested_axes(
    parser: StrategyParser, index: int, entry: Entry, computed: TensorLayout
) -> tuple[Axes, ...]:
    shape = parser.op.outputs[index].shape
    exact = isinstance(entry, TensorLayout)
    counts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
    assert counts is not None
    if len(counts) != len(shape):
        raise parser.error(
            f"output {index} {list(shape)} has {len(shape)} dimensions, but {entry_text(entry)} has"
            f" {len(counts)}"
        )
    if isinstance(entry, TensorLayout):
        requested = axes_on_mesh(parser.op.name, entry, parser.mesh)
        axes = requested if _adds_minor_axes(requested, computed) else None
    else:
        axes = _axes_for_counts(counts, computed)
    fits = all(size % count == 0 for size, count in zip(shape, counts, strict=True))
    if axes is None or not fits:
        raise _invalid_output(parser, index, entry, computed, exact)
    return axes


def _adds_minor_axes(requested: tuple[Axes, ...], computed: TensorLayout) -> bool:
    """Whether `requested` only appends axes of the partial sum to those of each dimension."""
    return all(
        axes[: len(own)] == own and computed.partial.issuperset(axes[len(own) :])
        for axes, own in zip(requested, computed.axes, strict=True)
    )


def _axes_for_counts(counts: tuple[int, ...], computed: TensorLayout) -> tuple[Axes, ...] | None:
    free, requested = sorted(computed.partial), []
    for count, own, axes in zip(counts, computed.shard_counts, computed.axes, strict=True):
        extra = None if count % own else first_axes(count // own, free, computed.layout)
        if extra is None:
            return None
        requested.append((*axes, *extra))
    return tuple(requested)


def _invalid_output(
    parser: StrategyParser, index: int, entry: Entry, computed: TensorLayout, exact: bool
) -> StrategyError:
    names = parser.named(sorted(computed.partial))
    over = f" over {names}" if names else ""
    if computed.partial:
        num_terms = computed.layout.size(computed.partial)
        description = (
            f"{entry_text(computed.shard_counts)}, a partial sum of {num_terms} terms{over}"
        )
        options = _reduce_scatter_counts(computed, parser.op.outputs[index].shape)
        scattered = ", ".join(map(entry_text, options))
        valid = f"{entry_text(computed.shard_counts)} (all-reduce)"
        valid += f", {scattered} (reduce-scatter)" if scattered else ""
        valid += "; the axes of the sum must be the innermost of a dimension" if exact else ""
    else:
        description = f"{entry_text(computed.shard_counts)}, not a partial sum"
        dims = ", ".join(parser.named(axes) or "None" for axes in computed.axes)
        valid = f"({dims})" if exact else entry_text(computed.shard_counts)
    return parser.error(
        f"output {index} {list(parser.op.outputs[index].shape)} cannot be sharded as"
        f" {entry_text(entry)}: the operator computes it as {description}; valid is {valid}"
    )


def _reduce_scatter_counts(
    computed: TensorLayout, shape: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """The shard counts after reduce-scattering the whole sum onto one dimension."""
    terms, counts = computed.layout.size(computed.partial), computed.shard_counts
    for dim, size in enumerate(shape):
        if size % (counts[dim] * terms) == 0:
            yield (*counts[:dim], counts[dim] * terms, *counts[dim + 1 :])


def cut_axes(
    where: str, option: str, tensor: Value, entry: Entry, mesh: DeviceMatrix, used: tuple[Axes, ...]
) -> tuple[Axes, ...]:
    """The axes that cut each dimension of a tensor for which `option` requests `entry`.

    Shard counts first take the axes that cut the dimension where the tensor is used, so that as
    little as possible is communicated, then the outermost axes that remain.

    Args:
        used: the axes that cut each dimension where an operator reads it.

    Raises:
        StrategyError: if the tensor cannot be sharded as requested.
    """
    if entry is None:
        return used
    where = f"{where} {list(tensor.shape)}"
    axes = axes_on_mesh(where, entry, mesh) if isinstance(entry, TensorLayout) else None
    counts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
    request = f"{option} {entry_text(entry)}"
    if len(counts) != len(tensor.shape):
        raise StrategyError(
            f"{where} has {len(tensor.shape)} dimensions, but its entry in {option},"
            f" {entry_text(entry)}, has {len(counts)}"
        )
    for dim, (size, count) in enumerate(zip(tensor.shape, counts, strict=True)):
        if size % count:
            raise StrategyError(
                f"{where}: {request}: dimension {dim} has size {size}, which is not divisible into"
                f" {count} shards; valid are {divisors(size, mesh.num_devices)}"
            )
    return (
        axes if axes is not None else _storage_axes_for_counts(where, request, counts, mesh, used)
    )


def _storage_axes_for_counts(
    where: str, request: str, counts: tuple[int, ...], mesh: DeviceMatrix, used: tuple[Axes, ...]
) -> tuple[Axes, ...]:
    reused = [_leading_axes(count, axes, mesh) for count, axes in zip(counts, used, strict=True)]
    used_axes = {axis for axes in reused for axis in axes}
    free = [axis for axis in range(len(mesh.device_matrix)) if axis not in used_axes]
    stored = []
    for count, axes in zip(counts, reused, strict=True):
        extra = first_axes(count // mesh.size(axes), free, mesh)
        if extra is None:
            raise StrategyError(
                f"{where}: {request} does not fit {mesh.num_devices} devices; the product of the"
                " shard counts must divide their number"
            )
        stored.append((*axes, *extra))
    return tuple(stored)


def _leading_axes(count: int, axes: Axes, mesh: DeviceMatrix) -> Axes:
    """The longest prefix of `axes` whose sizes multiply to a divisor of `count`."""
    leading: list[int] = []
    primes = list(prime_factors(gcd(count, mesh.num_devices)))
    for axis in axes:
        if mesh.device_matrix[axis] not in primes:
            break
        primes.remove(mesh.device_matrix[axis])
        leading.append(axis)
    return tuple(leading)

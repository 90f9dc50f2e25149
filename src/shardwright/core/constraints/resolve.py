"""Resolve the user's strategies to cuts and layouts, which constrain the search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from shardwright.core.constraints.device_matrix import (
    axes_on_mesh,
    common_device_matrix,
    take_outer_axes,
)
from shardwright.core.constraints.parse import StrategyParser, divisors_text
from shardwright.core.constraints.strategy import Entry, OperatorStrategy, entries_text, entry_text
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes, prime_factors
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.decisions import Storage
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts
from shardwright.errors import StrategyError

OutputAxes = tuple[tuple[Axes, ...] | None, ...]
"""The axes that shard each dimension of each output; None for an output left to the search."""


@dataclass(frozen=True)
class ResolvedConstraints:
    """Decisions of a plan that the user's strategies determine.

    Args:
        mesh: device matrix with axes of prime size, on which all layouts of the user can be
            expressed.
        cuts: the mesh axes of each sharded factor, by pinned operator; `{}` for an operator pinned
            as replicated. A bias that a separate operator adds is sharded like the pinned output.
        outputs: the output axes of each operator with an `out_strategy`, by operator.
    """

    mesh: DeviceMatrix
    cuts: dict[str, Cuts]
    outputs: dict[str, OutputAxes]


def resolve(
    graph: Graph,
    devices: int,
    strategies: Mapping[str, OperatorStrategy],
    parameters: Mapping[str, Entry],
    group_sizes: Iterable[int] = (),
) -> ResolvedConstraints:
    """Resolve strategies to cuts on a common device matrix.

    Args:
        graph: the captured graph.
        devices: number of devices of one pipeline stage.
        strategies: the strategy of each pinned operator, by its name.
        parameters: the requested storage of parameters, by name; only its layouts are used here,
            since the device matrix must express all layouts.
        group_sizes: devices per group at each level of the interconnect, ascending, such as `(8,)`.

    Raises:
        StrategyError: if an operator cannot be sharded as requested; the message has its shapes and
            the valid values.
        LayoutError: if a layout has another number of devices, or no device matrix can express all
            layouts.
    """
    layouts = [(name, layout) for name, s in strategies.items() for layout in s.layouts]
    # Storage, too, must be expressed by axes of the mesh.
    layouts += [(name, e) for name, e in parameters.items() if isinstance(e, TensorLayout)]
    mesh = common_device_matrix(devices, layouts, group_sizes)
    cuts: dict[str, Cuts] = {}
    outputs: dict[str, OutputAxes] = {}
    for name, strategy in strategies.items():
        op = graph.by_name[name]
        parser = StrategyParser(op, _unflatten_strategy(op, strategy, mesh), mesh)
        cuts[name] = parser.cuts()
        if (output_axes := requested_outputs(parser, cuts[name])) is not None:
            outputs[name] = output_axes
    # After all pins, since a bias may be pinned itself.
    for name in strategies:
        bias = graph.by_name.get(f"{name}.bias")
        # Not by name alone, since a submodule may be called `bias` too.
        if bias is not None and bias.inputs[0] is graph.by_name[name].output:
            output = outputs.get(name, (None,))[0]
            axes = (
                _compute_output_axes(graph.by_name[name], mesh, cuts[name])
                if output is None
                else output
            )
            # A pin of the bias itself takes precedence.
            cuts.setdefault(bias.name, _derive_cuts_from_input(bias, axes))
    return ResolvedConstraints(mesh, cuts, outputs)


def _unflatten_strategy(op: Op, strategy: OperatorStrategy, mesh: DeviceMatrix) -> OperatorStrategy:
    """Return `strategy` for the shapes in the graph, if it has an entry for flattened dimensions.

    Where the user's code flattens leading dimensions, as in `x.view(-1, k) @ w`, the graph has the
    unflattened dimensions. They share the shards that the user requests for the flattened
    dimension.
    """

    def unflatten_entry(value: Value, entry: Entry) -> Entry:
        dims = entry.axes if isinstance(entry, TensorLayout) else entry
        # An entry that already has the dimensions of the graph is not changed.
        if entry is None or not dims or len(dims) != len(value.shape) - op.flattened + 1:
            return entry
        flattened_shape = value.shape[: op.flattened]
        if isinstance(entry, TensorLayout):
            first, *other_axes = axes_on_mesh(op.name, entry, mesh)
            sizes = [mesh.device_matrix[axis] for axis in first]
            axes = _assign_axes_to_dims(flattened_shape, first, sizes)
            return TensorLayout(mesh, (*map(tuple, axes), *other_axes))
        # One mesh axis per prime factor, as the mesh has prime sizes.
        primes = prime_factors(entry[0])
        counts = map(prod, _assign_axes_to_dims(flattened_shape, primes, primes))
        return (*counts, *entry[1:])

    def entries(values: Sequence[Value], requested: tuple[Entry, ...]) -> tuple[Entry, ...]:
        # Entries beyond the number of values are kept, so that the parser reports them.
        return (*map(unflatten_entry, values, requested), *requested[len(values) :])

    outputs = strategy.outputs
    if op.flattened == 1:
        return strategy
    return OperatorStrategy(
        entries(op.inputs, strategy.inputs),
        None if outputs is None else entries(op.outputs, outputs),
    )


def _assign_axes_to_dims(
    shape: Sequence[int], axes: Iterable[int], sizes: Iterable[int]
) -> list[list[int]]:
    """Assign each axis to the outermost dimension whose local size its size divides; if no
    dimension is divisible, to the last.

    Args:
        shape: sizes of the dimensions.
        axes: the axes to assign, in order.
        sizes: the size of each axis.

    Returns:
        The axes of each dimension.
    """
    local_shape, axes_of_dim = list(shape), [list[int]() for _ in shape]
    for axis, size in zip(axes, sizes, strict=True):
        divisible = (dim for dim, local_size in enumerate(local_shape) if local_size % size == 0)
        # If no dimension is divisible, the parser reports the last one.
        dim = next(divisible, len(local_shape) - 1)
        # Later axes divide the remaining local size.
        local_shape[dim] //= size
        axes_of_dim[dim].append(axis)
    return axes_of_dim


def _compute_output_axes(op: Op, mesh: DeviceMatrix, cuts: Cuts) -> tuple[Axes, ...]:
    """Return the axes that shard each dimension of an operator's first output, partial sums
    all-reduced."""
    rule = rule_of(op)
    assert rule is not None
    return rule.layouts(mesh, cuts)[1][0].axes


def _derive_cuts_from_input(op: Op, axes: tuple[Axes, ...]) -> dict[str, Axes]:
    """Return the cuts of an operator, given the axes that shard each dimension of its first
    input."""
    rule = rule_of(op)
    assert rule is not None
    factors = zip(rule.inputs[0], axes, strict=True)
    return {
        factor: axes_of_dim
        for factor, axes_of_dim in factors
        if factor is not None and factor in rule.factors and axes_of_dim
    }


def requested_storage(
    graph: Graph, mesh: DeviceMatrix, parameters: Mapping[str, Entry], read_axes: Storage
) -> dict[str, tuple[Axes, ...]]:
    """Return the axes that shard each dimension of every stored parameter, by name.

    Args:
        graph: the captured graph.
        mesh: device matrix with axes of prime size.
        parameters: the requested storage, by name.
        read_axes: the axes of the layout in which operators read each parameter, by name; the
            default storage.

    Raises:
        StrategyError: if a parameter cannot be sharded as requested.
    """
    # Parameters without an entry are stored as operators read them, without communication.
    stored = {name: tuple(axes) for name, axes in read_axes.items()}
    for value in graph.parameters:
        if value.name in parameters:
            where, entry = f"parameter {value.name}", parameters[value.name]
            used_axes = stored[value.name]
            stored[value.name] = axes_for_entry(
                where, "parameter_plan", value, entry, mesh, used_axes
            )
    return stored


def requested_outputs(parser: StrategyParser, cuts: Cuts) -> OutputAxes | None:
    """Return the output axes that the `out_strategy` requests; None without an `out_strategy`.

    An output can have the layout in which the operator computes it. A partial sum is all-reduced,
    or reduce-scattered onto any dimensions; the axes of the sum become the innermost axes of these
    dimensions.

    Args:
        parser: the operator with its strategy.
        cuts: the axes of each sharded factor of the operator.

    Raises:
        StrategyError: if an output cannot have the requested layout; the message lists the valid
            entries.
    """
    op, entries = parser.op, parser.strategy.outputs
    if entries is None:
        return None
    if len(entries) != len(op.outputs):
        raise parser.error(
            f"out_strategy {entries_text(entries)} has {len(entries)} entries for"
            f" {len(op.outputs)} outputs\nuse one entry per output, None for an output left to the"
            " search"
        )
    _, computed = parser.rule.layouts(parser.mesh, cuts)
    return tuple(
        None if entry is None else _assign_output_axes(parser, index, entry, computed[index])
        for index, entry in enumerate(entries)
    )


def _assign_output_axes(
    parser: StrategyParser, index: int, entry: Entry, computed: TensorLayout
) -> tuple[Axes, ...]:
    shape = parser.op.outputs[index].shape
    is_layout = isinstance(entry, TensorLayout)
    counts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
    assert counts is not None
    if len(counts) != len(shape):
        raise parser.error(
            f"output {index} {list(shape)} has {len(shape)} dimensions, but {entry_text(entry)} has"
            f" {len(counts)}\nuse an entry with {len(shape)} dimensions"
        )
    if isinstance(entry, TensorLayout):
        requested = axes_on_mesh(parser.op.name, entry, parser.mesh)
        axes = requested if _only_appends_axes_of_sum(requested, computed) else None
    else:
        axes = _append_axes_of_sum(counts, computed)
    divides = all(size % count == 0 for size, count in zip(shape, counts, strict=True))
    if axes is None or not divides:
        raise _make_output_error(parser, index, entry, computed, is_layout)
    return axes


def _only_appends_axes_of_sum(requested: tuple[Axes, ...], computed: TensorLayout) -> bool:
    """Whether the `requested` layout only appends axes of the partial sum to those of the
    `computed` layout, in each dimension."""
    return all(
        # A reduce-scatter subdivides the shards of a dimension, so its axes come last.
        axes[: len(computed_axes)] == computed_axes
        and computed.partial.issuperset(axes[len(computed_axes) :])
        for axes, computed_axes in zip(requested, computed.axes, strict=True)
    )


def _append_axes_of_sum(counts: tuple[int, ...], computed: TensorLayout) -> tuple[Axes, ...] | None:
    """Append axes of the partial sum to the `computed` axes of each dimension, up to the requested
    shard count.

    Args:
        counts: requested shard count of each dimension.

    Returns:
        The axes of each dimension; None if no axes of the sum have the required product.
    """
    # Outermost first; `take_outer_axes` removes the axes that it takes.
    free, requested = sorted(computed.partial), []
    for count, computed_count, axes in zip(
        counts, computed.shard_counts, computed.axes, strict=True
    ):
        extra = (
            None
            # A reduce-scatter can only subdivide the shards that the operator computes.
            if count % computed_count
            else take_outer_axes(count // computed_count, free, computed.layout)
        )
        if extra is None:
            return None
        requested.append((*axes, *extra))
    return tuple(requested)


def _make_output_error(
    parser: StrategyParser, index: int, entry: Entry, computed: TensorLayout, is_layout: bool
) -> StrategyError:
    names = parser.user_axis_names(sorted(computed.partial))
    over = f" over {names}" if names else ""
    if computed.partial:
        num_terms = computed.layout.size(computed.partial)
        description = (
            f"{entry_text(computed.shard_counts)}, a partial sum of {num_terms} terms{over}"
        )
        options = _iterate_reduce_scatter_counts(computed, parser.op.outputs[index].shape)
        scattered = ", ".join(map(entry_text, options))
        valid = f"{entry_text(computed.shard_counts)} (all-reduce)"
        valid += f", {scattered} (reduce-scatter)" if scattered else ""
        valid += "; the axes of the sum must be the innermost of a dimension" if is_layout else ""
    else:
        description = f"{entry_text(computed.shard_counts)}, not a partial sum"
        dims = ", ".join(parser.user_axis_names(axes) or "None" for axes in computed.axes)
        valid = f"({dims})" if is_layout else entry_text(computed.shard_counts)
    return parser.error(
        f"output {index} {list(parser.op.outputs[index].shape)} cannot be sharded as"
        f" {entry_text(entry)}: the operator computes it as {description}\nvalid entries: {valid}"
    )


def _iterate_reduce_scatter_counts(
    computed: TensorLayout, shape: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield the shard counts after a reduce-scatter of the full partial sum onto one dimension, for
    each dimension whose size permits it."""
    terms, counts = computed.layout.size(computed.partial), computed.shard_counts
    # Suggests only to scatter the whole sum onto one dimension.
    for dim, size in enumerate(shape):
        if size % (counts[dim] * terms) == 0:
            yield (*counts[:dim], counts[dim] * terms, *counts[dim + 1 :])


def axes_for_entry(
    where: str,
    option: str,
    tensor: Value,
    entry: Entry,
    mesh: DeviceMatrix,
    read_axes: tuple[Axes, ...],
) -> tuple[Axes, ...]:
    """Return the axes that shard each dimension of a tensor as its entry requests.

    For shard counts, a dimension first gets the axes in `read_axes`, which need no communication,
    then the outermost of the remaining axes.

    Args:
        where: description of the tensor in errors, such as `parameter net.weight`.
        option: name of the option that contains the entry, for errors.
        tensor: the input or parameter.
        entry: the requested sharding; None for the axes in `read_axes`.
        mesh: device matrix with axes of prime size.
        read_axes: the axes that shard each dimension where an operator reads the tensor.

    Raises:
        StrategyError: if the tensor cannot be sharded as requested.
    """
    if entry is None:
        return read_axes
    where = f"{where} {list(tensor.shape)}"
    axes = axes_on_mesh(where, entry, mesh) if isinstance(entry, TensorLayout) else None
    counts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
    request = f"{option} {entry_text(entry)}"
    if len(counts) != len(tensor.shape):
        raise StrategyError(
            f"{where} has {len(tensor.shape)} dimensions, but its entry in {option},"
            f" {entry_text(entry)}, has {len(counts)}\nuse an entry with {len(tensor.shape)}"
            " dimensions"
        )
    for dim, (size, count) in enumerate(zip(tensor.shape, counts, strict=True)):
        if size % count:
            raise StrategyError(
                f"{where}: {request}: dimension {dim} has size {size}, which is not divisible into"
                f" {count} shards\n"
                f"valid numbers of shards are {divisors_text(size, mesh.num_devices)}"
            )
    return (
        axes if axes is not None else _assign_storage_axes(where, request, counts, mesh, read_axes)
    )


def _assign_storage_axes(
    where: str,
    request: str,
    counts: tuple[int, ...],
    mesh: DeviceMatrix,
    read_axes: tuple[Axes, ...],
) -> tuple[Axes, ...]:
    # Along axes with which the operator reads the parameter, storage needs no communication.
    reused = [
        _find_prefix_dividing_count(count, axes, mesh)
        for count, axes in zip(counts, read_axes, strict=True)
    ]
    used_axes = {axis for axes in reused for axis in axes}
    # Dimensions take what their reused axes lack from the axes that none reuses, outermost first.
    free = [axis for axis in range(len(mesh.device_matrix)) if axis not in used_axes]
    stored = []
    for count, axes in zip(counts, reused, strict=True):
        extra = take_outer_axes(count // mesh.size(axes), free, mesh)
        if extra is None:
            raise StrategyError(
                f"{where}: {request} cannot be distributed over {mesh.num_devices} devices\nuse"
                f" shard counts whose product divides {mesh.num_devices}"
            )
        stored.append((*axes, *extra))
    return tuple(stored)


def _find_prefix_dividing_count(count: int, axes: Axes, mesh: DeviceMatrix) -> Axes:
    """Return the longest prefix of `axes` whose product of sizes divides `count`."""
    leading: list[int] = []
    # Axes have prime sizes, so a prefix divides `count` if its sizes are among the prime factors.
    primes = list(prime_factors(gcd(count, mesh.num_devices)))
    for axis in axes:
        if mesh.device_matrix[axis] not in primes:
            break
        primes.remove(mesh.device_matrix[axis])
        leading.append(axis)
    return tuple(leading)

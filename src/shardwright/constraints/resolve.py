"""What the strategies of a model's pinned operators fix before any search starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.constraints.parse import Reading, divisors, first_axes, mesh_of, placed
from shardwright.constraints.strategy import Entry, OperatorStrategy, entries_text, entry_text
from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph, Op, Value
from shardwright.layout.axes import Axes, prime_factors
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.partition.decisions import Storage
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts

"""For each parameter the axes that cut each dimension as it is stored."""


@dataclass(frozen=True)
class ResolvedConstraints:
    """What is fixed of a plan.

    Args:
        mesh: the device matrix, in which all layouts that were given can be expressed.
        cuts: of every pinned operator; `{}` for one that is whole. Biases of pinned operators are
            cut like the output that they are added to.
        outputs: of the operators that have an out_strategy.
    """

    mesh: Layout
    cuts: dict[str, Cuts]
    outputs: dict[str, OutputAxes]


def resolve(
    graph: Graph,
    devices: int,
    strategies: Mapping[str, OperatorStrategy],
    parameters: Mapping[str, Entry],
) -> ResolvedConstraints:
    """Reads strategies as cuts on a common device matrix.

    Args:
        strategies: by name of the operator.
        parameters: how parameters are to be stored; only their layouts count here.

    Raises:
        StrategyError: if an operator cannot be cut so; names it, its shapes and what is valid.
        LayoutError: if the layouts are of another number of devices, or have no common axes.
    """
    layouts = [(name, layout) for name, s in strategies.items() for layout in s.layouts]
    layouts += [(name, e) for name, e in parameters.items() if isinstance(e, TensorLayout)]
    mesh = mesh_of(devices, layouts)
    cuts: dict[str, Cuts] = {}
    outputs: dict[str, OutputAxes] = {}
    for name, strategy in strategies.items():
        reading = Reading(graph.by_name[name], strategy, mesh)
        cuts[name] = reading.cuts()
        if (said_of_outputs := outputs_of(reading, cuts[name])) is not None:
            outputs[name] = said_of_outputs
    for name in strategies:
        bias = graph.by_name.get(f"{name}.bias")
        if bias is not None and bias.inputs[0] is graph.by_name[name].output:
            left = outputs.get(name, (None,))[0]
            axes = _made(graph.by_name[name], mesh, cuts[name]) if left is None else left
            cuts.setdefault(bias.name, _reading_first(bias, axes))
    return ResolvedConstraints(mesh, cuts, outputs)


def _made(op: Op, mesh: Layout, cuts: Cuts) -> tuple[Axes, ...]:
    """The axes that cut the output of a pinned operator; axes of a sum count as all-reduced."""
    found = rule_of(op)
    assert found is not None
    return found.layouts(mesh, cuts)[1][0].axes


def _reading_first(op: Op, axes: tuple[Axes, ...]) -> dict[str, Axes]:
    """The cuts with which an operator reads its first input cut by `axes`."""
    found = rule_of(op)
    assert found is not None
    factors = zip(found.inputs[0], axes, strict=True)
    return {f: cut for f, cut in factors if f is not None and f in found.factors and cut}


def requested_storage(
    graph: Graph, mesh: Layout, parameters: Mapping[str, Entry], used: Storage
) -> dict[str, tuple[Axes, ...]]:
    """How every parameter is stored: as `used`, but where the user says how.

    Raises:
        StrategyError: if a parameter cannot be cut as it is said.
    """
    stored = {name: tuple(axes) for name, axes in used.items()}
    for value in graph.parameters:
        if value.name in parameters:
            entry = parameters[value.name]
            stored[value.name] = storage_of(value, entry, mesh, stored[value.name])
    return stored


OutputAxes = tuple[tuple[Axes, ...] | None, ...]
"""For each output the axes that cut each dimension; None where the operator is free."""


def outputs_of(reading: Reading, cuts: Cuts) -> OutputAxes | None:
    """In which layouts the operator is to leave its outputs; None if nothing is said.

    Each can be left as it is made; where it is made as a partial sum the axes of the sum are
    all-reduced, or reduce-scattered onto any dimensions, as their minor axes.

    Raises:
        StrategyError: if an output cannot be left so; lists how it can.
    """
    op, entries = reading.op, reading.strategy.outputs
    if entries is None:
        return None
    if len(entries) != len(op.outputs):
        raise reading.error(
            f"out_strategy {entries_text(entries)} has {len(entries)} entries for"
            f" {len(op.outputs)} outputs"
        )
    _, made = reading.rule.layouts(reading.mesh, cuts)
    return tuple(
        None if entry is None else _left(reading, index, entry, made[index])
        for index, entry in enumerate(entries)
    )


def _left(reading: Reading, index: int, entry: Entry, made: TensorLayout) -> tuple[Axes, ...]:
    shape = reading.op.outputs[index].shape
    exact = isinstance(entry, TensorLayout)
    parts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
    assert parts is not None
    if len(parts) != len(shape):
        raise reading.error(
            f"output {index} has {len(shape)} dimensions, {list(shape)}, and"
            f" {entry_text(entry)} is for {len(parts)}"
        )
    if isinstance(entry, TensorLayout):
        wanted = placed(reading.op.name, entry, reading.mesh)
        left = wanted if _adds_minor_axes(wanted, made) else None
    else:
        left = _of_counts(parts, made)
    fits = all(size % count == 0 for size, count in zip(shape, parts, strict=True))
    if left is None or not fits:
        raise _impossible(reading, index, entry, made, exact)
    return left


def _adds_minor_axes(wanted: tuple[Axes, ...], made: TensorLayout) -> bool:
    """Whether `wanted` is what is made, plus axes of the partial sum after those of a dimension."""
    return all(
        axes[: len(before)] == before and made.partial.issuperset(axes[len(before) :])
        for axes, before in zip(wanted, made.axes, strict=True)
    )


def _of_counts(parts: tuple[int, ...], made: TensorLayout) -> tuple[Axes, ...] | None:
    free, left = sorted(made.partial), []
    for count, before, axes in zip(parts, made.shard_counts, made.axes, strict=True):
        more = None if count % before else first_axes(count // before, free, made.layout)
        if more is None:
            return None
        left.append((*axes, *more))
    return tuple(left)


def _impossible(
    reading: Reading, index: int, entry: Entry, made: TensorLayout, exact: bool
) -> StrategyError:
    names = "".join(made.alias_names[axis] for axis in sorted(made.partial))
    if made.partial:
        parts = made.layout.size(made.partial)
        how = f"{entry_text(made.shard_counts)} as a sum of {parts} terms over axes {names}"
        scattered = ", ".join(map(entry_text, _scattered(made, reading.op.outputs[index].shape)))
        valid = f"{entry_text(made.shard_counts)} (all-reduce)"
        valid += f", {scattered} (reduce-scatter)" if scattered else ""
        valid += ", the axes of the sum after those that are there" if exact else ""
    else:
        how = f"{entry_text(made.shard_counts)}, no sum"
        valid = str(made) if exact else entry_text(made.shard_counts)
    return reading.error(
        f"output {index} {list(reading.op.outputs[index].shape)} cannot be left as"
        f" {entry_text(entry)}; it is made as {how}; valid is {valid}"
    )


def _scattered(made: TensorLayout, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Counts when the whole sum is reduce-scattered onto one dimension that it divides."""
    terms, counts = made.layout.size(made.partial), made.shard_counts
    for dim, size in enumerate(shape):
        if size % (counts[dim] * terms) == 0:
            yield (*counts[:dim], counts[dim] * terms, *counts[dim + 1 :])


def storage_of(
    parameter: Value, entry: Entry, mesh: Layout, used: tuple[Axes, ...]
) -> tuple[Axes, ...]:
    """The axes that cut each dimension of a parameter as it is stored.

    Counts take the axes that cut the dimension where the parameter is used, as far as they go, so
    that no more is moved than must be; then the outermost that are left.

    Args:
        used: the axes that cut each dimension where an operator reads it.

    Raises:
        StrategyError: if the parameter cannot be cut so.
    """
    return cut_axes(f"parameter {parameter.name}", "parameter_plan", parameter, entry, mesh, used)


def cut_axes(
    where: str, what: str, tensor: Value, entry: Entry, mesh: Layout, used: tuple[Axes, ...]
) -> tuple[Axes, ...]:
    """The axes that cut each dimension of a tensor of which `entry` is said in `what`.

    Raises:
        StrategyError: if it cannot be cut so.
    """
    if entry is None:
        return used
    where = f"{where} {list(tensor.shape)}"
    axes = placed(where, entry, mesh) if isinstance(entry, TensorLayout) else None
    parts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
    said = f"{what} {entry_text(entry)}"
    if len(parts) != len(tensor.shape):
        raise StrategyError(
            f"{where} has {len(tensor.shape)} dimensions, and {entry_text(entry)} in {what} is for"
            f" {len(parts)}"
        )
    for dim, (size, count) in enumerate(zip(tensor.shape, parts, strict=True)):
        if size % count:
            raise StrategyError(
                f"{where}: {count} equal parts do not divide dimension {dim} of size {size}, as"
                f" {said} asks; valid are {divisors(size, mesh.num_devices)}"
            )
    return axes if axes is not None else _axes_of_counts(where, said, parts, mesh, used)


def _axes_of_counts(
    where: str, said: str, parts: tuple[int, ...], mesh: Layout, used: tuple[Axes, ...]
) -> tuple[Axes, ...]:
    kept = [_leading(count, axes, mesh) for count, axes in zip(parts, used, strict=True)]
    taken = {axis for axes in kept for axis in axes}
    free = [axis for axis in range(len(mesh.device_matrix)) if axis not in taken]
    stored = []
    for count, axes in zip(parts, kept, strict=True):
        more = first_axes(count // mesh.size(axes), free, mesh)
        if more is None:
            raise StrategyError(
                f"{where}: {said} cannot be had on {mesh.num_devices} devices ="
                f" {mesh.device_matrix}; the product of the counts must divide the number of"
                " devices"
            )
        stored.append((*axes, *more))
    return tuple(stored)


def _leading(count: int, axes: Axes, mesh: Layout) -> Axes:
    """The first of the `axes` that together divide `count`."""
    kept: list[int] = []
    primes = list(prime_factors(count))
    for axis in axes:
        if mesh.device_matrix[axis] not in primes:
            break
        primes.remove(mesh.device_matrix[axis])
        kept.append(axis)
    return tuple(kept)

"""Fold a device matrix to the fewest axes that decisions need, or split it into prime axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, islice

from shardwright.core.layout.axes import Axes, axis_names, prime_factors
from shardwright.core.layout.joined_axes import join_axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.axis_meaning import name_axes
from shardwright.core.partition.decisions import CutAxes, Decisions
from shardwright.core.partition.partitioned import Partitioned


def fold_axes(partitioned: Partitioned, unjoined_mesh: DeviceMatrix | None = None) -> Partitioned:
    """Join neighboring axes that all decisions and redistributions use together, and name axes by
    their meaning. Shards and communication of each device stay the same.

    A search decides axes of prime sizes. Plans, process groups and DTensor placements have the
    folded axes: data and tensor parallelism on 1,024 devices are (dp 128, tp 8).

    Args:
        unjoined_mesh: device matrix of the same ranks whose axes must not be joined.
    """
    mesh = partitioned.mesh
    strides = () if unjoined_mesh is None else _strides(unjoined_mesh)
    # Axes may be joined where `unjoined_mesh` has no axis boundary of the same stride.
    joinable = {axis for axis, stride in enumerate(_strides(mesh)) if stride not in strides}
    joined = join_axes(
        len(mesh.device_matrix),
        _axes_of(partitioned),
        lambda axis, inner: inner == axis + 1 and axis in joinable,
    )
    new_axis_of = {axes[0]: new for new, axes in enumerate(joined)}
    decisions = _renumbered(
        partitioned.decisions,
        lambda axes: tuple(new_axis_of[axis] for axis in axes if axis in new_axis_of),
    )
    sizes = tuple(map(mesh.size, joined))
    if unjoined_mesh is not None and sizes == unjoined_mesh.device_matrix:
        return replace(partitioned, mesh=unjoined_mesh, decisions=decisions)
    names = name_axes(partitioned.graph, len(sizes), decisions)
    matrix = DeviceMatrix(sizes, names, mesh.rank_list)
    return partitioned if matrix == mesh else replace(partitioned, mesh=matrix, decisions=decisions)


def dtensor_axes(partitioned: Partitioned) -> tuple[Axes, ...]:
    """Axes of the `DeviceMesh` of all DTensors, each as the axes of the device matrix it joins:
    those that all parameters and sharded outputs use together, neighbors or not."""
    # Fewer axes than the device matrix has: the time of DTensor's first step grows exponentially
    # with the axes of its mesh.
    layouts = [
        chunk.communication.returned(value)
        for chunk in partitioned.chunks
        for value in chunk.returned
    ]
    axis_lists = [axes for dims in partitioned.decisions.storage.values() for axes in dims]
    axis_lists += [axes for layout in layouts for axes in layout.axes]
    axis_lists += [tuple(sorted(layout.partial)) for layout in layouts]
    return join_axes(len(partitioned.mesh.device_matrix), axis_lists)


def split_axes(mesh: DeviceMatrix, decisions: Decisions) -> tuple[DeviceMatrix, Decisions]:
    """Split each axis of a device matrix into axes of prime sizes, and renumber decisions."""
    factors = [prime_factors(size) for size in mesh.device_matrix]
    starts = list(accumulate(map(len, factors), initial=0))
    sizes = tuple(size for primes in factors for size in primes)
    matrix = DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))), mesh.rank_list)
    return matrix, _renumbered(
        decisions, lambda axes: tuple(n for a in axes for n in range(starts[a], starts[a + 1]))
    )


def _strides(mesh: DeviceMatrix) -> list[int]:
    """Number of devices inside each axis but the last: the stride of the axis in ranks."""
    count = len(mesh.device_matrix)
    return [mesh.size(range(axis + 1, count)) for axis in range(count - 1)]


def _axes_of(partitioned: Partitioned) -> Iterator[Axes]:
    """All axis lists that a program depends on; axes of a set are in ascending order."""
    decisions = partitioned.decisions
    for factors in decisions.cuts.values():
        yield from factors.values()
    for tensors in (decisions.storage, decisions.arrivals, decisions.departures):
        for dims in tensors.values():
            yield from dims
    for outputs in decisions.outputs.values():
        for output_axes in outputs:
            yield from output_axes or ()
    for chunk in partitioned.chunks:
        # A cheaper route may redistribute parts of an axis separately, so steps count too.
        for step in {transfer.step for transfer in chunk.communication.transfers}:
            yield step.axes
            for layout in (step.source, step.target):
                yield from layout.axes
                yield tuple(sorted(layout.partial))
                yield tuple(sorted(layout.varying))


def _renumbered(decisions: Decisions, renumber: Callable[[Axes], Axes]) -> Decisions:
    def changed(dims: CutAxes) -> CutAxes:
        return tuple(map(renumber, dims))

    return replace(
        decisions,
        cuts={
            name: {factor: renumber(axes) for factor, axes in factors.items()}
            for name, factors in decisions.cuts.items()
        },
        storage={name: changed(dims) for name, dims in decisions.storage.items()},
        outputs={
            name: tuple(None if dims is None else changed(dims) for dims in outputs)
            for name, outputs in decisions.outputs.items()
        },
        arrivals={name: changed(dims) for name, dims in decisions.arrivals.items()},
        departures={name: changed(dims) for name, dims in decisions.departures.items()},
    )

"""Fold a device matrix to the fewest axes that decisions need, or split its axes into axes of prime
size."""

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
    """Join neighboring axes that all decisions and redistributions use together, and name the
    joined axes by their meaning.

    Shards and communication of each device do not change. A search decides over axes of prime
    sizes, while plans, process groups and DTensor placements have the folded axes, such as (dp 128,
    tp 8) on 1,024 devices.

    Args:
        unjoined_mesh: another device matrix of the same ranks; two axes are not joined if it also
            has a boundary between axes at their boundary.
    """
    mesh = partitioned.mesh
    # Compared by strides, as the two matrices have different numbers of axes.
    strides = () if unjoined_mesh is None else _compute_axis_strides(unjoined_mesh)
    # Axes may be joined where `unjoined_mesh` has no axis boundary of the same stride.
    joinable = {
        axis for axis, stride in enumerate(_compute_axis_strides(mesh)) if stride not in strides
    }
    joined = join_axes(
        len(mesh.device_matrix),
        _iterate_used_axes(partitioned),
        # Neighbors only: joining others would change the order of ranks.
        lambda axis, inner: inner == axis + 1 and axis in joinable,
    )
    # The first axis represents its group; all other axes of the group follow it in every list.
    new_axis = {axes[0]: index for index, axes in enumerate(joined)}
    decisions = _renumber_axes_of_decisions(
        partitioned.decisions,
        lambda axes: tuple(new_axis[axis] for axis in axes if axis in new_axis),
    )
    sizes = tuple(map(mesh.size, joined))
    # The user's device matrix keeps the user's names of its axes.
    if unjoined_mesh is not None and sizes == unjoined_mesh.device_matrix:
        return replace(partitioned, mesh=unjoined_mesh, decisions=decisions)
    names = name_axes(partitioned.graph, len(sizes), decisions)
    folded_mesh = DeviceMatrix(sizes, names, mesh.rank_list)
    # The same object, which keeps its cached chunks and communication.
    if folded_mesh == mesh:
        return partitioned
    return replace(partitioned, mesh=folded_mesh, decisions=decisions)


def dtensor_axes(partitioned: Partitioned) -> tuple[Axes, ...]:
    """Return the axes of the `DeviceMesh` of all DTensors, each as axes of the device matrix.

    Axes of the device matrix that all parameters and sharded outputs use together are one axis of
    the `DeviceMesh`, whether or not they are neighbors.
    """
    # The time of DTensor's first step grows exponentially with the number of axes of its mesh, so
    # it has fewer axes than the device matrix.
    layouts = [
        chunk.communication.returned_layout(value)
        for chunk in partitioned.chunks
        for value in chunk.returned
    ]
    used_axes = [axes for dims in partitioned.decisions.storage.values() for axes in dims]
    used_axes += [axes for layout in layouts for axes in layout.axes]
    used_axes += [tuple(sorted(layout.partial)) for layout in layouts]
    return join_axes(len(partitioned.mesh.device_matrix), used_axes)


def split_axes(mesh: DeviceMatrix, decisions: Decisions) -> tuple[DeviceMatrix, Decisions]:
    """Return the device matrix with each axis split into axes of prime sizes, and `decisions` with
    the axes of this device matrix."""
    primes_of_axis = [prime_factors(size) for size in mesh.device_matrix]
    # Index of the first prime axis of each axis, and the number of all prime axes at the end.
    starts = list(accumulate(map(len, primes_of_axis), initial=0))
    sizes = tuple(size for primes in primes_of_axis for size in primes)
    prime_mesh = DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))), mesh.rank_list)
    return prime_mesh, _renumber_axes_of_decisions(
        decisions, lambda axes: tuple(n for a in axes for n in range(starts[a], starts[a + 1]))
    )


def _compute_axis_strides(mesh: DeviceMatrix) -> list[int]:
    """Return the number of devices inside each axis (its stride in ranks), without the last
    axis."""
    num_axes = len(mesh.device_matrix)
    return [mesh.size(range(axis + 1, num_axes)) for axis in range(num_axes - 1)]


def _iterate_used_axes(partitioned: Partitioned) -> Iterator[Axes]:
    """Yield each tuple of axes that decisions or redistributions use; unordered axes are sorted."""
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
        # Redistributions may use parts of an axis separately, so their steps count too.
        for step in {transfer.step for transfer in chunk.communication.transfers}:
            yield step.axes
            for layout in (step.source, step.target):
                yield from layout.axes
                yield tuple(sorted(layout.partial))
                yield tuple(sorted(layout.varying))


def _renumber_axes_of_decisions(
    decisions: Decisions, renumber: Callable[[Axes], Axes]
) -> Decisions:
    def renumber_dims(dims: CutAxes) -> CutAxes:
        return tuple(map(renumber, dims))

    return replace(
        decisions,
        cuts={
            name: {factor: renumber(axes) for factor, axes in factors.items()}
            for name, factors in decisions.cuts.items()
        },
        storage={name: renumber_dims(dims) for name, dims in decisions.storage.items()},
        outputs={
            name: tuple(None if dims is None else renumber_dims(dims) for dims in outputs)
            for name, outputs in decisions.outputs.items()
        },
        arrivals={name: renumber_dims(dims) for name, dims in decisions.arrivals.items()},
        departures={name: renumber_dims(dims) for name, dims in decisions.departures.items()},
    )

"""How a parameter is stored, when the user says it."""

from __future__ import annotations

from shardwright.axes import prime_factors
from shardwright.errors import StrategyError
from shardwright.graph.graph import Value
from shardwright.layout import Axes, Layout, TensorLayout
from shardwright.strategy.entry import Entry, entry_text
from shardwright.strategy.mesh import first_axes, placed
from shardwright.strategy.reading import divisors


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

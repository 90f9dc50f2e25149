"""ZeRO and HSDP: store parameters sharded over axes over which all their uses are replicated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import CutAxes, OptimizerParallel, Storage
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts
from shardwright.errors import StrategyError

KB = 1024


def sharded_storage(
    graph: Graph,
    mesh: DeviceMatrix,
    cuts: Mapping[str, Cuts],
    used: Storage,
    sharding: OptimizerParallel,
    pinned: Collection[str] = (),
) -> Storage:
    """Return the storage layouts of parameters with ZeRO: each is sharded over further axes, over
    which all its uses are replicated.

    All added axes shard the same dim, so that a single all-gather restores the parameter. This is
    the first dim that `used` does not shard; if no such dim is divisible, the first dim.
    `shard_size` sets over how many devices a parameter is sharded:

    - -1: as many as divide the dim.
    - Another size: the innermost axes with that many devices, replicated over the others (HSDP);
      fewer devices if the dim is not divisible by `shard_size`.

    Args:
        used: the axes that shard each dim of each parameter where operators read it, by parameter
            name.
        sharding: ZeRO configuration: `shard_size`, and the `threshold` in KB below which parameters
            are not sharded.
        pinned: names of parameters whose storage the user pinned; their storage does not change.

    Raises:
        StrategyError: if a parameter is replicated over at least `shard_size` devices, but no
            combination of these axes has `shard_size` devices; or if each is replicated over fewer
            devices.
    """
    max_replicas = 1
    cut_axes = _sharding_axes_by_parameter(graph, mesh, cuts)
    storage = dict(used)
    cached: dict[object, CutAxes] = {}
    for value in graph.parameters:
        size = value.numel * value.stored_dtype.itemsize
        # Gathering a small parameter takes the latency of a collective and saves little memory.
        if value.name in pinned or size < sharding.threshold * KB:
            continue
        # An axis that shards any use would make the gather depend on the use.
        used_axes = cut_axes[value].union(*map(frozenset, used[value.name]))
        free_axes = tuple(a for a in range(len(mesh.device_matrix)) if a not in used_axes)
        max_replicas = max(max_replicas, mesh.size(free_axes))
        # Layers repeat: few parameters differ in all of these.
        key = value.shape, used[value.name], free_axes
        if key not in cached:
            cached[key] = _shard_storage_over_free_axes(
                value, mesh, used[value.name], free_axes, sharding.shard_size
            )
        storage[value.name] = cached[key]
    # A plan that replicates nothing has nothing to shard, whatever `shard_size`.
    if 1 < max_replicas < sharding.shard_size:
        raise StrategyError(
            f"shard_size={sharding.shard_size}: no parameter is replicated over more than"
            f" {max_replicas} devices\nuse shard_size={max_replicas} or less, or -1 for all devices"
            " that replicate a parameter"
        )
    return storage


def _sharding_axes_by_parameter(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts]
) -> dict[Value, frozenset[int]]:
    """Return for each parameter the axes over which at least one operator reads a shard of it."""
    cut_axes: dict[Value, frozenset[int]] = {value: frozenset() for value in graph.parameters}
    for value in graph.parameters:
        for op, index in graph.consumers[value]:
            if (rule := rule_of(op)) is not None:
                inputs, _ = rule.layouts(mesh, cuts.get(op.name, {}))
                cut_axes[value] |= inputs[index].sharded
    return cut_axes


def _shard_storage_over_free_axes(
    value: Value, mesh: DeviceMatrix, used: CutAxes, free_axes: Axes, shard_size: int
) -> CutAxes:
    """Return the axes that shard each dim of a stored parameter: those in `used`, and for one dim
    also some of `free_axes`.

    Args:
        used: the axes that shard each dim where the parameter is used.
        free_axes: axes over which all uses replicate the parameter.
        shard_size: maximum product of the sizes of the added axes, which divides it; -1 for no
            limit.
    """
    subsets = [axes for n in range(1, len(free_axes) + 1) for axes in combinations(free_axes, n)]
    if 1 <= shard_size <= mesh.size(free_axes):
        valid = sorted({1, *(mesh.size(axes) for axes in subsets)})
        if shard_size not in valid:
            raise StrategyError(
                f"shard_size={shard_size}: parameter {value.name!r} is replicated over"
                f" {mesh.size(free_axes)} devices, which have no mesh axes of size {shard_size}\n"
                f"use one of -1, {', '.join(map(str, valid))}"
            )
    if shard_size != -1:
        # Fewer devices are valid too, for a dim that `shard_size` does not divide.
        subsets = [axes for axes in subsets if shard_size % mesh.size(axes) == 0]
    # In order of preference: most devices, a dim that nothing shards yet, the first such dim, and
    # the innermost axes, whose links are the fastest.
    valid_shardings = [
        (mesh.size(axes), not used[dim], -dim, axes)
        for axes in subsets
        for dim, extent in enumerate(value.shape)
        if extent and extent % mesh.size((*used[dim], *axes)) == 0
    ]
    if not valid_shardings:
        return used
    _, _, negative_dim, axes = max(valid_shardings)
    return tuple((*cut, *axes) if dim == -negative_dim else cut for dim, cut in enumerate(used))

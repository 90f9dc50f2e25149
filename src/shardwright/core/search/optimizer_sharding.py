"""Where parameters are stored sharded that are used whole: optimizer parallel (HSDP, ZeRO)."""

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
    """`used`, each parameter sharded further over axes on which all its uses hold it whole.

    One dimension takes the axes, so that one collective gathers it: of those that divide, one that
    no tensor-parallel axis cuts, the first rather than a later one. With `shard_size=-1` it is
    sharded over as many devices as divide it; with a smaller size over the innermost axes of that
    size, and replicated between. Where nothing of that size divides, over fewer devices.

    Args:
        used: how parameters are stored without it.
        pinned: parameters whose storage the user pinned; they stay.

    Raises:
        StrategyError: if no axes of a parameter that is held whole by `shard_size` devices or more
            have that size; lists the sizes that there are.
    """
    cut = _cut_axes(graph, mesh, cuts)
    storage = dict(used)
    known: dict[object, CutAxes] = {}
    for value in graph.parameters:
        size = value.numel * value.stored_dtype.itemsize
        if value.name in pinned or size < sharding.threshold * KB:
            continue
        taken = cut[value].union(*map(frozenset, used[value.name]))
        free = tuple(a for a in range(len(mesh.device_matrix)) if a not in taken)
        alike = value.shape, used[value.name], free
        if alike not in known:
            known[alike] = _sharded(value, mesh, used[value.name], free, sharding.shard_size)
        storage[value.name] = known[alike]
    return storage


def _cut_axes(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts]
) -> dict[Value, frozenset[int]]:
    """The axes over which any operator reads a parameter cut."""
    axes_of: dict[Value, frozenset[int]] = {value: frozenset() for value in graph.parameters}
    for value in graph.parameters:
        for op, index in graph.consumers[value]:
            if (rule := rule_of(op)) is not None:
                inputs, _ = rule.layouts(mesh, cuts.get(op.name, {}))
                axes_of[value] |= inputs[index].sharded
    return axes_of


def _sharded(
    value: Value, mesh: DeviceMatrix, used: CutAxes, free: Axes, shard_size: int
) -> CutAxes:
    subsets = [axes for n in range(1, len(free) + 1) for axes in combinations(free, n)]
    if 1 <= shard_size <= mesh.size(free):
        valid = sorted({1, *(mesh.size(axes) for axes in subsets)})
        if shard_size not in valid:
            raise StrategyError(
                f"shard_size={shard_size}: parameter {value.name!r} is replicated over"
                f" {mesh.size(free)} devices; valid values are -1, {', '.join(map(str, valid))}"
            )
    if shard_size != -1:
        subsets = [axes for axes in subsets if shard_size % mesh.size(axes) == 0]
    fitting = [
        (mesh.size(axes), not used[dim], -dim, axes)
        for axes in subsets
        for dim, extent in enumerate(value.shape)
        if extent and extent % mesh.size((*used[dim], *axes)) == 0
    ]
    if not fitting:
        return used
    _, _, place, axes = max(fitting)
    return tuple((*cut, *axes) if dim == -place else cut for dim, cut in enumerate(used))

"""Modes without a search: data parallel, data parallel except for pinned operators, and no cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.micro_batches.batch_dims import JoinedDims
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.indexed_graph import NO_CUT, IndexedGraph, index_graph
from shardwright.core.search.recursive.axis_level import AxisLevel
from shardwright.core.search.recursive.search import nearest_multiples, record_axis
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.errors import StrategyError


def data_parallel(
    graph: Graph, mesh: DeviceMatrix, batch_dims: Mapping[str, int | None] | None = None
) -> CutsOfGraph:
    """Return the cuts of data parallelism: all axes shard the batch.

    The batch dims are those that `sample_dims` returns. If some operators would stay replicated,
    the input dims whose sharding shards the most elements are used instead. An example is a time
    dim of as many steps as the batch has samples.

    Args:
        batch_dims: batch dims by input name, as specified by the user; None to find them.

    Raises:
        StrategyError: if the model has no tensor input, or its batch size is not a multiple of the
            number of devices.
    """
    devices, batch_size = mesh.num_devices, index_graph(graph).batch_size
    if batch_size is None:
        raise StrategyError(
            "data parallel: the model has no tensor input with a batch dimension\n"
            'use another mode, such as mode="recursive_programming"'
        )
    named = _with_named_batch_dims(graph, batch_dims or {})
    if named is not None:
        if named.batch_size is not None and named.batch_size % devices:
            raise _make_indivisible_batch_error(named.batch_size, devices, "`batch_dims`")
        return _shard_along_batch(named, mesh)
    # Cutting a deep model takes most of a second, so batch sizes are checked first.
    if all(value.shape[0] % devices for value in graph.input_values if value.shape):
        hint = _suggest_batch_dims(graph, devices)
        raise _make_indivisible_batch_error(batch_size, devices, hint=hint)
    batched, cuts = _data_parallel_cuts(graph, mesh)
    # The dim that is sharded as the batch may be another than the check above looked at.
    if batched.batch_size is not None and batched.batch_size % devices:
        raise _make_indivisible_batch_error(batch_size, devices)
    return cuts


def _make_indivisible_batch_error(
    batch_size: int, devices: int, dims: str = "dim 0 of the inputs", hint: str = ""
) -> StrategyError:
    valid = " or ".join(map(str, nearest_multiples(batch_size, devices)))
    return StrategyError(
        f"data parallel: the batch size {batch_size} ({dims}) is not divisible by"
        f" {devices} devices\nvalid batch sizes are multiples of {devices}, such as {valid}{hint}"
    )


def _suggest_batch_dims(graph: Graph, devices: int) -> str:
    """Return the words that name the first dim that may be the batch and is divisible, or ""."""
    joined_dims = JoinedDims(graph)
    for value in graph.input_values:
        for dim, size in enumerate(value.shape):
            is_feature = joined_dims.shares_factor_with_parameter((value, dim))
            if dim > 0 and size % devices == 0 and not is_feature:
                named = f"batch_dims={{{value.name!r}: {dim}}}"
                return f"; if another dim is the batch, name it: `{named}`"
    return ""


def _with_named_batch_dims(
    graph: Graph, batch_dims: Mapping[str, int | None]
) -> IndexedGraph | None:
    """Return the indexed graph with the named batch dims; None if no dim is named."""
    if all(dim is None for dim in batch_dims.values()):
        return None
    return _replace_batch_dims(index_graph(graph), graph, JoinedDims(graph).named(batch_dims))


def semi_auto(
    graph: Graph,
    mesh: DeviceMatrix,
    pinned: Mapping[str, Cuts],
    batch_dims: Mapping[str, int | None] | None = None,
) -> CutsOfGraph:
    """Return the cuts in `pinned`, and data-parallel cuts of all other operators.

    A batch size that is not divisible by the number of devices is cut over as many axes as divide
    it, outermost first. Operators that do not depend on the batch are replicated. Redistributions
    connect operators with different cuts.
    """
    named = _with_named_batch_dims(graph, batch_dims or {})
    cuts = _data_parallel_cuts(graph, mesh)[1] if named is None else _shard_along_batch(named, mesh)
    # Only the pinned operators change: neighbors do not follow, unlike in sharding propagation.
    cuts.update({name: dict(factors) for name, factors in pinned.items()})
    return {name: factors for name, factors in cuts.items() if factors}


def _data_parallel_cuts(graph: Graph, mesh: DeviceMatrix) -> tuple[IndexedGraph, CutsOfGraph]:
    """Return the indexed graph with the batch dims whose sharding saves the most activation memory,
    and the data-parallel cuts along these dims."""
    indexed = index_graph(graph)
    # Dim 0 of the inputs first: it is the batch of nearly all models.
    best = indexed, _shard_along_batch(indexed, mesh)
    if _shards_all_batch_ops(*best, mesh):
        return best
    for dims in JoinedDims(graph).candidates(mesh.num_devices):
        batched = _replace_batch_dims(indexed, graph, dims)
        cuts = _shard_along_batch(batched, mesh)
        if _num_elements_saved_by_sharding(graph, mesh, cuts) > _num_elements_saved_by_sharding(
            graph, mesh, best[1]
        ):
            best = batched, cuts
    return best


def _shards_all_batch_ops(indexed: IndexedGraph, cuts: CutsOfGraph, mesh: DeviceMatrix) -> bool:
    """Whether `cuts` shard over all devices every main operator that depends on the batch.

    In a model without main operators, all operators count.
    """
    on_batch = {value for value, dim in enumerate(indexed.batch_dims) if dim != NO_CUT}
    for op, name in enumerate(indexed.names):
        # Operators come in graph order, so one pass finds all that depend on the batch.
        if not on_batch.isdisjoint(indexed.inputs[op]):
            on_batch.update(indexed.outputs[op])
            # In a model without main operators all operators count.
            has_cost = indexed.op_types[op].is_main or not indexed.main
            if has_cost and _num_shards(cuts.get(name, {}), mesh) < mesh.num_devices:
                return False
    return True


def _replace_batch_dims(
    indexed: IndexedGraph, graph: Graph, dims: Sequence[int | None]
) -> IndexedGraph:
    """Return a copy of `indexed` in which the batch dims of the model inputs are `dims`.

    Args:
        dims: batch dim of each leaf of the model's arguments; None for a leaf without a batch.
    """
    dim_of = {
        leaf: dim
        for leaf, dim in zip(graph.inputs, dims, strict=True)
        if isinstance(leaf, Value) and dim is not None
    }
    # Of any input, as all dims of a candidate belong to one batch.
    size = next(value.shape[dim] for value, dim in dim_of.items())
    batch_dims = tuple(dim_of.get(value, NO_CUT) for value in graph.values())
    return replace(indexed, batch_dims=batch_dims, batch_size=size)


def _num_elements_saved_by_sharding(graph: Graph, mesh: DeviceMatrix, cuts: CutsOfGraph) -> float:
    """Return how many fewer activation elements a device computes with `cuts` than unsharded."""
    return sum(
        # A device computes 1/n of an operator that is cut n ways.
        value.numel * (1 - 1 / _num_shards(cuts.get(op.name, {}), mesh))
        for op in graph.ops
        for value in op.outputs
    )


def _num_shards(cuts: Cuts, mesh: DeviceMatrix) -> int:
    return mesh.size(tuple(axis for axes in cuts.values() for axis in axes))


def _shard_along_batch(indexed: IndexedGraph, mesh: DeviceMatrix) -> CutsOfGraph:
    # Axis by axis, so that a batch that not all axes divide is cut over the axes that do.
    shard_counts = [(1,) * len(op_type.factors) for op_type in indexed.op_types]
    cuts: CutsOfGraph = {}
    for axis, axis_size in enumerate(mesh.device_matrix):
        level = AxisLevel(indexed, shard_counts, axis_size)
        # No operator is decided by cost first, so all of them follow the batch of the inputs.
        level.decide_remaining()
        record_axis(indexed, level.choices, axis, cuts)
        shard_counts = level.next_shard_counts()
    return cuts


class DataParallel(SearchMode):
    """Search mode that makes all operators data parallel."""

    name: ClassVar[str] = "data_parallel"
    takes_pins: ClassVar[bool] = False

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return data_parallel(request.graph, request.mesh, request.batch_dims)


class SemiAuto(SearchMode):
    """Search mode that keeps the cuts of pinned operators; all others are data parallel."""

    name: ClassVar[str] = "semi_auto"

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return semi_auto(request.graph, request.mesh, request.pinned, request.batch_dims)


class StandAlone(SearchMode):
    """Search mode that replicates all operators."""

    name: ClassVar[str] = "stand_alone"
    takes_pins: ClassVar[bool] = False

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return {}

"""Modes without a search: data parallel, data parallel except for pinned operators, and no cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.indexed_graph import IndexedGraph, index_graph
from shardwright.core.search.recursive.axis_level import AxisLevel
from shardwright.core.search.recursive.search import nearest_multiples, record_axis
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.errors import StrategyError


def data_parallel(graph: Graph, mesh: DeviceMatrix) -> CutsOfGraph:
    """Return the cuts of data parallelism: all axes shard the batch, dim 0 of the inputs.

    Raises:
        StrategyError: if the model has no tensor input, or its batch size is not a multiple of the
            number of devices.
    """
    indexed = index_graph(graph)
    devices, batch_size = mesh.num_devices, indexed.batch_size
    if batch_size is None:
        raise StrategyError(
            "data parallel: the model has no tensor input with a batch dimension\n"
            'use another mode, such as mode="recursive_programming"'
        )
    if batch_size % devices:
        valid = " or ".join(map(str, nearest_multiples(batch_size, devices)))
        raise StrategyError(
            f"data parallel: the batch size {batch_size} (dim 0 of the inputs) is not divisible by"
            f" {devices} devices\nvalid batch sizes are multiples of {devices}, such as {valid}"
        )
    return _data_parallel_cuts(indexed, mesh)


def semi_auto(graph: Graph, mesh: DeviceMatrix, pinned: Mapping[str, Cuts]) -> CutsOfGraph:
    """Return the cuts in `pinned`, and data-parallel cuts of all other operators.

    A batch size that is not divisible by the number of devices is cut over as many axes as divide
    it, outermost first. Operators that do not depend on the batch are replicated. Redistributions
    connect operators with different cuts.
    """
    cuts = _data_parallel_cuts(index_graph(graph), mesh)
    # Only the pinned operators change: neighbors do not follow, unlike in sharding propagation.
    cuts.update({name: dict(factors) for name, factors in pinned.items()})
    return {name: factors for name, factors in cuts.items() if factors}


def _data_parallel_cuts(indexed: IndexedGraph, mesh: DeviceMatrix) -> CutsOfGraph:
    # Axis by axis, so that a batch that not all devices divide is cut over as many as do.
    shard_counts = [(1,) * len(op_type.factors) for op_type in indexed.op_types]
    cuts: CutsOfGraph = {}
    for axis, axis_size in enumerate(mesh.device_matrix):
        level = AxisLevel(indexed, shard_counts, axis_size)
        # No operator is decided by cost first, so all of them follow the batch of the inputs.
        level.decide_remaining()
        record_axis(indexed, level.choice, axis, cuts)
        shard_counts = level.next_shard_counts()
    return cuts


class DataParallel(SearchMode):
    """Data parallelism of all operators."""

    name: ClassVar[str] = "data_parallel"
    takes_pins: ClassVar[bool] = False

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return data_parallel(request.graph, request.mesh)


class SemiAuto(SearchMode):
    """Pinned operators keep the cuts of the user; all other operators are data parallel."""

    name: ClassVar[str] = "semi_auto"

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return semi_auto(request.graph, request.mesh, request.pinned)


class StandAlone(SearchMode):
    """No cuts: all operators are replicated."""

    name: ClassVar[str] = "stand_alone"
    takes_pins: ClassVar[bool] = False

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return {}

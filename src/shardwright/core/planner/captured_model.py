"""A captured model, with the caches that all candidates for it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.core.constraints import requested_storage
from shardwright.core.constraints.recompute import recompute_of
from shardwright.core.constraints.shard import Pins
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.cost.predict import ChunkTime
from shardwright.core.cost.step_time import StepTime
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import OptimizerParallel, Recompute, Storage
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.optimizer_sharding import sharded_storage
from shardwright.errors import StrategyError


class SharedCuts(dict[str, Cuts]):
    """Cuts of all operators; a model has one object for equal cuts (`CapturedModel.share`).

    Hashed by identity, which makes look-ups in the caches of the model fast.
    """

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


@dataclass(frozen=True)
class CapturedModel:
    """A captured model, the user's constraints, and caches that all candidates share.

    Args:
        graph: graph of one micro-batch.
        pins: strategies and parameter placements fixed by the user.
        modules: module names that are valid in `stage_config`.
        training: whether the model was captured in training mode.
        loss_reduction: reduction over the losses of micro-batches, `mean` or `sum`.
        batch_dims: sample dimension of each leaf of the model's arguments; empty if it is 0 for
            all.
        dry_runs: cache of the dry runs of chunks, which measure memory.
        search_results: cached (cuts, seconds that the search took), or the error that the search
            raised, by the arguments of the search.
        shared_cuts: cuts of earlier candidates, by their content.
        storages: cached storage of parameters, by device matrix, cuts, and `shard_size` and
            `threshold` of ZeRO.
        chunk_assignments: cached chunk index of each operator, by device matrix, cuts, and numbers
            of stages and of chunks.
        chunk_times: cached (decisions, seconds of each chunk) pairs, by numbers of stages and of
            chunks, and whether the schedule splits the backward pass. Searches often return equal
            cuts; pairs are in a list, as decisions are not hashable.
        step_times_by_cluster: cached (cluster, seconds of each chunk by its key) pairs; clusters
            are not hashable.
    """

    graph: Graph
    pins: Pins
    modules: tuple[str, ...]
    training: bool
    loss_reduction: str = "mean"
    batch_dims: tuple[int | None, ...] = ()
    dry_runs: DryRunCache = field(default_factory=DryRunCache)
    search_results: dict[object, tuple[Sequence[SharedCuts], float] | StrategyError] = field(
        default_factory=dict
    )
    shared_cuts: dict[object, SharedCuts] = field(default_factory=dict)
    storages: dict[object, Storage] = field(default_factory=dict)
    chunk_assignments: dict[object, Mapping[str, int]] = field(default_factory=dict)
    chunk_times: dict[object, list[tuple[tuple[object, ...], Sequence[ChunkTime]]]] = field(
        default_factory=dict
    )
    step_times_by_cluster: list[tuple[Cluster, dict[object, StepTime]]] = field(
        default_factory=list
    )

    @cached_property
    def recompute(self) -> Mapping[str, Recompute]:
        """Recomputation of the operators marked by `sw.recompute`, by operator name."""
        return recompute_of(self.graph)

    @property
    def is_pinned(self) -> bool:
        """Whether the user pinned any operator or parameter."""
        return bool(self.pins.strategies or self.pins.parameters)

    def step_times(self, cluster: Cluster) -> dict[object, StepTime]:
        """Return the cache of the seconds of chunks on `cluster`, by the keys of `chunk_times`.

        Candidates that differ in other chunks share them.
        """
        for cached_cluster, times in self.step_times_by_cluster:
            if cached_cluster == cluster:
                return times
        self.step_times_by_cluster.append((cluster, {}))
        return self.step_times_by_cluster[-1][1]

    def share(self, cuts: Mapping[str, Cuts]) -> SharedCuts:
        """Return the shared object for all cuts of this model that are equal to `cuts`."""
        if isinstance(cuts, SharedCuts):
            return cuts
        key = tuple((name, tuple(op_cuts.items())) for name, op_cuts in cuts.items())
        if key not in self.shared_cuts:
            self.shared_cuts[key] = SharedCuts(cuts)
        return self.shared_cuts[key]

    def storage(
        self, mesh: DeviceMatrix, cuts: SharedCuts, sharding: OptimizerParallel | None
    ) -> Storage:
        """Return the mesh axes that shard each dim of each stored parameter.

        A parameter is stored as pinned, else as sharded by ZeRO or HSDP, else as operators read it.

        Args:
            sharding: ZeRO configuration; the level is ignored.
        """
        options = None if sharding is None else (sharding.shard_size, sharding.threshold)
        key = mesh, cuts, options
        if key not in self.storages:
            pinned = self.pins.parameters
            used: Storage = (
                requested_storage(self.graph, mesh, pinned, default_storage(self.graph, mesh, cuts))
                if sharding is None
                else self.storage(mesh, cuts, None)
            )
            self.storages[key] = (
                used
                if sharding is None
                else sharded_storage(self.graph, mesh, cuts, used, sharding, pinned)
            )
        return self.storages[key]

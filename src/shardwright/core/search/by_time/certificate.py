"""The optimality gap of a plan: its objective relative to a lower bound for all plans on its mesh.

The objective is formula (1) of `core.search`: the seconds of a step plus the weighted parameter
memory, where redistributions of activations do not overlap computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from shardwright.core.cost.cluster import TREES, Cluster, LinkLevel, LinkSpans
from shardwright.core.cost.collectives import Links
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes, axis_names, prime_factors
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import Decisions
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.bound import lower_bound
from shardwright.core.search.by_time.count_tables import CountTables, TooManyCutsError
from shardwright.core.search.by_time.search import TimedSearch, timed_search
from shardwright.core.search.request import CutsOfGraph, SearchRequest, TimedStep
from shardwright.progress import OnShare, ignore_share, subrange

MAX_UNFOLDED_VARIABLES = 600
"""Maximum number of variables of a problem for which the bound is optimized without folding
repeated blocks. With folding, optimization is faster and the bound slightly lower."""

TABLE_PRECISION = 1e-5
"""Fraction by which a bound is lowered, as tables in single precision have rounding errors."""


@dataclass(frozen=True)
class CertifiedCuts:
    """Cuts, their objective, and a lower bound on the objective of all cuts.

    Args:
        cost: objective of `cuts`, in seconds.
        bound: lower bound on the objective of all cuts, in seconds; 0 if no bound is known.
    """

    cuts: CutsOfGraph
    cost: float
    bound: float

    @property
    def gap(self) -> float | None:
        """The fraction by which `cost` exceeds `bound`; None if no bound is known."""
        return max(0.0, self.cost / self.bound - 1) if self.bound > 0 else None


def certify(request: SearchRequest, cuts: Mapping[str, Cuts]) -> CertifiedCuts:
    """Return the objective of a sharding, and a lower bound on the objective of all shardings.

    Args:
        request: the search, with a cluster as cost model, and a device matrix whose axes have prime
            sizes; reports the completed fraction to its `on_share`.
        cuts: the mesh axes of each factor of each operator, by operator name.

    Raises:
        StrategyError: if the search has no cluster, so that its costs are not in seconds.
        ConfigError: if the cluster has fewer devices than the mesh and its pipeline stages.
    """
    unfolded = timed_search(request, fold=False)
    cost = unfolded.cost(cuts)
    total = unfolded.total(cost)
    is_folded = len(unfolded.problem.variables) > MAX_UNFOLDED_VARIABLES
    # Messages on the folded problem take a fraction of the time.
    search = timed_search(request) if is_folded else unfolded
    # λ of `by_time/search.py`. It drops out where devices share a processor; λ = 0 is exact where
    # nothing is exposed.
    exposed_shares = (
        (1.0,) if unfolded.model.shares_processor else (1.0, 0.5) if cost.exposed else (0.0,)
    )
    timed_step, weight = unfolded.timed_step, unfolded.model.parameter_weight
    fast = _replace_links_by_fastest(timed_step.cluster)
    # If the tables for the cluster's links are too large, those with equal links may not be.
    models = (
        unfolded.model,
        TimeModel(fast, request.mesh, timed_step.stages, timed_step.optimizer_shard_size, weight),
    )
    for model in models:
        try:
            # Every λ proves a bound; the largest is the closest to the objective.
            bound = max(
                _compute_lower_bound(
                    search,
                    unfolded,
                    model,
                    exposed_share,
                    cuts,
                    subrange(request.on_share, index, len(exposed_shares)),
                )
                for index, exposed_share in enumerate(exposed_shares)
            )
        except TooManyCutsError:
            continue
        # No bound may exceed the objective of a plan, not even by rounding.
        return CertifiedCuts(_copy_cuts(cuts), total, min(total, bound * (1 - TABLE_PRECISION)))
    # 0 is a lower bound of any objective, and says that no other is known.
    return CertifiedCuts(_copy_cuts(cuts), total, 0.0)


def _compute_lower_bound(
    search: TimedSearch,
    unfolded: TimedSearch,
    model: TimeModel,
    exposed_share: float,
    cuts: Mapping[str, Cuts],
    on_share: OnShare,
) -> float:
    table_part, message_part = subrange(on_share, 0, 3, size=2), subrange(on_share, 2, 3)
    tables = CountTables(search.problem, model, search.weights(exposed_share), cuts, table_part)
    return lower_bound(tables, unfolded.problem, message_part)


def _replace_links_by_fastest(cluster: Cluster) -> Cluster:
    """Return `cluster` with all devices on a single level of links with its best rate and latency.

    No collective takes longer on the result than on `cluster`, so bounds for the result hold for
    `cluster` too. As axes of equal size then form one group, tables are much smaller.
    """
    levels = cluster.levels
    rate, latency = max(level.rate for level in levels), min(level.latency for level in levels)
    link = LinkLevel(levels[0].name, rate, latency, levels[-1].devices, TREES)
    return replace(cluster, levels=(link,))


def _copy_cuts(cuts: Mapping[str, Cuts]) -> CutsOfGraph:
    return {name: {f: tuple(axes) for f, axes in each.items()} for name, each in cuts.items()}


def to_prime_axes(
    mesh: DeviceMatrix, levels: Sequence[LinkSpans]
) -> tuple[DeviceMatrix, list[Axes]]:
    """Split the axes of a device matrix into axes of prime size.

    Args:
        levels: link levels that each axis of `mesh` crosses, the fastest first; see `Links.levels`.

    Returns:
        The new device matrix, and for each axis of `mesh` the axes that replace it.
    """
    sizes: list[int] = []
    prime_axes_of: list[Axes] = []
    for spans in levels:
        primes = [p for _, size in reversed(spans) for p in prime_factors(size)]
        prime_axes_of.append(tuple(range(len(sizes), len(sizes) + len(primes))))
        # Outermost first: the slowest level of an axis has its most significant factors.
        sizes += primes
    names = tuple(islice(axis_names(), len(sizes)))
    return DeviceMatrix(tuple(sizes), names, mesh.rank_list), prime_axes_of


def gap_of(
    graph: Graph,
    mesh: DeviceMatrix,
    decisions: Decisions,
    timed_step: TimedStep,
    mem_coeff: float,
    on_share: OnShare = ignore_share,
) -> float | None:
    """Return an upper bound on the relative gap between a plan's objective and the optimum.

    For example, 0.02 means that the plan is at most 2 % above the optimum. The optimum is over all
    plans with the same device matrix, stages and micro-batches; pins and fixed outputs are ignored.

    Args:
        mesh: device matrix of the plan; its axes need not be prime.

    Returns:
        None if the tables of the bound would be too large.
    """
    levels = Links(timed_step.cluster, mesh, timed_step.stages).levels
    primes, prime_axes_of = to_prime_axes(mesh, levels)

    def to_primes(axes: Axes) -> Axes:
        return tuple(prime for axis in axes for prime in prime_axes_of[axis])

    # Without pins and fixed outputs, as the bound is over all plans.
    request = SearchRequest(
        graph,
        primes,
        arrivals={n: tuple(map(to_primes, axes)) for n, axes in decisions.arrivals.items()},
        timed_step=timed_step,
        mem_coeff=mem_coeff,
        on_share=on_share,
    )
    cuts = {n: {f: to_primes(a) for f, a in each.items()} for n, each in decisions.cuts.items()}
    return certify(request, cuts).gap

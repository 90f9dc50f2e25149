"""How far a plan is from the best of its kind at most.

A plan's cost is what the search by seconds minimizes, for the plan as it is: seconds of a step in
which nothing is computed beside redistributions of activations, and what `mem_coeff` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from shardwright.core.cost.cluster import TREES, Cluster, LinkLevel, Spans
from shardwright.core.cost.collectives import Links
from shardwright.core.cost.step_time import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes, axis_names, prime_factors
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import Decisions
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.bound import lower_bound
from shardwright.core.search.by_time.count_tables import CountTables, TooManyWaysError
from shardwright.core.search.by_time.search import TimedSearch, timed_search
from shardwright.core.search.request import CutsOfGraph, Pricing, SearchRequest
from shardwright.progress import OnShare, ignore_share, subrange

MOST_OPERATORS = 600
"""Of a model with more, blocks that repeat are bounded as one, which weakens the bound a little."""

ROUNDING = 1e-5
"""Relative; tables have single precision."""


@dataclass(frozen=True)
class Certified:
    """A plan and how good it is at least.

    Args:
        cost: of the plan, in seconds (with what kept bytes count).
        bound: no plan costs less; 0 if nothing is known.
    """

    cuts: CutsOfGraph
    cost: float
    bound: float

    @property
    def gap(self) -> float | None:
        """By what share the plan is above the least cost at most; None if nothing is known."""
        return max(0.0, self.cost / self.bound - 1) if self.bound > 0 else None


def certified(request: SearchRequest, cuts: Mapping[str, Cuts]) -> Certified:
    """What a plan costs, and what every plan for this request costs at least.

    Args:
        request: on a device matrix of prime axes, with pricing.
        cuts: of the plan.

    The request's `on_share` is told of the bound.

    Raises: as `searches_by_time`.
    """
    every = timed_search(request, fold=False)
    cost = every.cost(cuts)
    total = every.total(cost)
    folds = len(every.problem.variables) > MOST_OPERATORS
    search = timed_search(request) if folds else every
    shares = (1.0,) if every.model.shared else (1.0, 0.5) if cost.exposed else (0.0,)
    pricing, weight = every.pricing, every.model.parameter_weight
    fast = _all_fast(pricing.cluster)
    models = (
        every.model,
        TimeModel(fast, request.mesh, pricing.stages, pricing.sharing, weight),
    )
    for model in models:
        try:
            bound = max(
                _bound(
                    search, every, model, share, cuts, subrange(request.on_share, n, len(shares))
                )
                for n, share in enumerate(shares)
            )
        except TooManyWaysError:
            continue
        return Certified(_plain(cuts), total, min(total, bound * (1 - ROUNDING)))
    return Certified(_plain(cuts), total, 0.0)


def _bound(
    search: TimedSearch,
    every: TimedSearch,
    model: TimeModel,
    share: float,
    cuts: Mapping[str, Cuts],
    on_share: OnShare,
) -> float:
    tabulates, bounds = subrange(on_share, 0, 3, size=2), subrange(on_share, 2, 3)
    tables = CountTables(search.problem, model, search.weights(share), cuts, tabulates)
    return lower_bound(tables, every.problem, bounds)


def _all_fast(cluster: Cluster) -> Cluster:
    """The same with all devices joined by the fastest of its links: nothing takes longer there, and
    axes are all alike."""
    levels = cluster.levels
    rate, latency = max(level.rate for level in levels), min(level.latency for level in levels)
    link = LinkLevel(levels[0].name, rate, latency, levels[-1].devices, TREES)
    return replace(cluster, levels=(link,))


def _plain(cuts: Mapping[str, Cuts]) -> CutsOfGraph:
    return {name: {f: tuple(axes) for f, axes in each.items()} for name, each in cuts.items()}


def in_prime_axes(mesh: DeviceMatrix, levels: Sequence[Spans]) -> tuple[DeviceMatrix, list[Axes]]:
    """A device matrix with an axis for each prime factor of each axis, and for each old axis the
    new ones that it is made of.

    Args:
        levels: the levels of links that each axis crosses, the fastest first.
    """
    sizes: list[int] = []
    made: list[Axes] = []
    for spans in levels:
        primes = [p for _, size in reversed(spans) for p in prime_factors(size)]
        made.append(tuple(range(len(sizes), len(sizes) + len(primes))))
        sizes += primes
    names = tuple(islice(axis_names(), len(sizes)))
    return DeviceMatrix(tuple(sizes), names, mesh.rank_list), made


def gap_of(
    graph: Graph,
    mesh: DeviceMatrix,
    decisions: Decisions,
    pricing: Pricing,
    mem_coeff: float,
    on_share: OnShare = ignore_share,
) -> float | None:
    """By what share a plan costs more at most than the best with the same device matrix, stages and
    micro-batches, whatever is pinned; None if there are too many to say.

    Args:
        mesh: of the plan, whose axes may be products.
    """
    levels = Links(pricing.cluster, mesh, pricing.stages).levels
    primes, made = in_prime_axes(mesh, levels)

    def finer(axes: Axes) -> Axes:
        return tuple(prime for axis in axes for prime in made[axis])

    request = SearchRequest(
        graph,
        primes,
        arrivals={n: tuple(map(finer, axes)) for n, axes in decisions.arrivals.items()},
        pricing=pricing,
        mem_coeff=mem_coeff,
        on_share=on_share,
    )
    cuts = {n: {f: finer(a) for f, a in each.items()} for n, each in decisions.cuts.items()}
    return certified(request, cuts).gap

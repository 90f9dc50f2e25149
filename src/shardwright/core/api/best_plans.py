"""The best plans of different kinds instead of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import nn

from shardwright.core.api.keywords import called_with
from shardwright.core.api.plan import decide_model
from shardwright.core.graph.graph import Graph
from shardwright.core.plan.ranked import RankedPlans
from shardwright.core.planner.options import COUNT, PlanOptions
from shardwright.core.planner.ranking import Ranking
from shardwright.errors import StrategyError


@dataclass(frozen=True)
class BestPlansCall(PlanOptions):
    """The arguments of `best_plans`: options of `plan`, after a model and an example."""

    net: nn.Module | Graph
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    top: Annotated[int, COUNT] = 5


@called_with(BestPlansCall)
def best_plans(call: BestPlansCall) -> RankedPlans:
    """The fastest plan of each of several kinds that fit into memory: plans differ in kind by what
    the options leave open of the number of micro-batches, of stages and their schedule
    (`"auto"`), and by how far parameters and optimizer state are stored in shards and whether
    operators are recomputed. The first is what `plan` gives with the same memory limit.

    Args:
        net, args, kwargs: as of `plan`, which this process makes for itself.
        top: of so many kinds.

    Raises: as `plan`, and
        StrategyError: without a cluster, which says how long a step takes.
    """
    options, ranking = PlanOptions(**call.keywords(PlanOptions)), Ranking(call.top)
    decide_model(within_devices(options), call.net, call.args, call.kwargs, ranking)
    return ranking.ranked()


def within_devices(options: PlanOptions) -> PlanOptions:
    """The options with the memory of the cluster's devices as limit, if there is no other. All of
    `mem_coeff="auto"` compete, where `plan` takes the smallest that fits unchanged.

    Raises:
        StrategyError: without a cluster.
    """
    if options.cluster is None:
        raise StrategyError(
            "plans are ranked by the seconds of a step: name a cluster, `local` is this machine"
        )
    coefficient = options.mem_coeffs[0] if options.has_auto_mem_coeff else options.mem_coeff
    limit = options.device_memory if options.memory_limit is None else options.memory_limit
    return replace(options, memory_limit=limit, mem_coeff=coefficient)

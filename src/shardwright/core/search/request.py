"""Input and interface of the search modes, and the cuts that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import ClassVar

from shardwright.core.cost.cluster import Cluster
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import CutAxes, Outputs
from shardwright.core.rules.rule import Cuts
from shardwright.errors import StrategyError
from shardwright.progress import OnShare, ignore_share

DEFAULT_MEM_COEFF = 0.1

VISIT_ORDERS = ("weight", "topology")

CutsOfGraph = dict[str, dict[str, tuple[int, ...]]]
"""The axes that cut each factor of each operator with cuts, by operator name; axes are in order of
significance."""


@dataclass(frozen=True)
class TimedStep:
    """The cluster and the training step whose predicted time a search minimizes.

    Args:
        stages: number of pipeline stages, each of which has its own devices for the device matrix.
        micro_batches: number of micro-batches per step; the graph describes one micro-batch.
        optimizer_shard_size: number of devices over which optimizer state is sharded (ZeRO); -1
            for all devices that replicate a parameter, None for no sharding.
    """

    cluster: Cluster
    stages: int = 1
    micro_batches: int = 1
    optimizer_shard_size: int | None = None

    def parameter_weight(self, mem_coeff: float) -> float:
        """Return the objective's weight of parameter all-gathers, gradient reductions and optimizer
        updates.

        The weight is below 1 if `mem_coeff` is below its default, so that the search favors
        replicated parameters.
        """
        # At most 1: a larger `mem_coeff` increases only `seconds_per_parameter_byte`.
        return min(1.0, mem_coeff / DEFAULT_MEM_COEFF)

    def seconds_per_parameter_byte(self, mem_coeff: float) -> float:
        """Return the weight of a byte of parameters: the seconds to send `mem_coeff` bytes over the
        fastest link."""
        # The fastest link of the cluster, so that the weight does not change with the mesh.
        return mem_coeff / max(level.bandwidth for level in self.cluster.levels)


@dataclass(frozen=True)
class SearchRequest:
    """Input of a search for the sharding of all operators of a graph over a device matrix.

    Args:
        pinned: cuts of pinned operators, by operator name; the search decides all other operators.
        outputs: fixed output layouts, by operator name; see `Outputs`.
        arrivals: axes that shard each dim of model inputs that arrive sharded, by input name.
        timed_step: cluster and training step whose seconds are minimized; None to minimize the
            symbolic cost.
        mem_coeff: weight of parameter memory. Small values favor data parallelism, large values
            tensor parallelism; with tiny values no operator is cut. With `timed_step` a byte of
            parameters on a device counts as `mem_coeff` bytes sent over the fastest link, and
            gathers, updates and gradient reductions of parameters count less if `mem_coeff` is
            below the default.
        order: order in which the symbolic search decides main operators on an axis, one of
            `VISIT_ORDERS`: largest cost first, or graph order. Embeddings come last in both.
        batch_dims: batch dims by input name, as specified by the user, for modes that shard the
            batch; None to find them.
        log_costs: whether to log the cost of every choice to `shardwright.search`.
        on_share: called with the completed fraction of a search that minimizes seconds. Other
            searches take less than a second and do not call it.

    Raises:
        StrategyError: if a pinned operator is not in the graph.
    """

    graph: Graph
    mesh: DeviceMatrix
    pinned: Mapping[str, Cuts] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)
    arrivals: Mapping[str, CutAxes] = field(default_factory=dict)
    timed_step: TimedStep | None = None
    mem_coeff: float = DEFAULT_MEM_COEFF
    order: str = "weight"
    batch_dims: Mapping[str, int | None] | None = None
    log_costs: bool = False
    # Not compared: a callback does not change the result.
    on_share: OnShare = field(default=ignore_share, compare=False, repr=False)

    def __post_init__(self) -> None:
        unknown = [name for name in self.pinned if name not in self.graph.by_name]
        if unknown:
            # cutoff=0.0: the nearest names are shown even if none is similar.
            nearest = get_close_matches(unknown[0], self.graph.by_name, n=3, cutoff=0.0)
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            raise StrategyError(
                f"pinned operators are not in the model: {', '.join(unknown[:10])}{more}\n"
                f"for {unknown[0]!r}, use one of {', '.join(nearest)}"
            )


class SearchMode(ABC):
    """An algorithm that decides the cuts of all operators; `search.modes.MODES` lists them.

    Attributes:
        name: value of the users' option `mode`.
        takes_pins: whether operators may be pinned; if not, the mode decides every operator.
        takes_cost_model: whether the mode minimizes a cost with `mem_coeff`: seconds if the request
            has a cluster, else the symbolic cost.
        requires_cluster: whether the mode needs a cluster in the request.
    """

    name: ClassVar[str]
    takes_pins: ClassVar[bool] = True
    takes_cost_model: ClassVar[bool] = False
    requires_cluster: ClassVar[bool] = False

    @abstractmethod
    def search(self, request: SearchRequest) -> Mapping[str, Cuts]:
        """Return the axes that cut each factor, by operator name; operators that are not in the
        result are replicated.

        Raises:
            StrategyError: if the mode finds no cuts for the model on the request's mesh.
        """

    def candidate_cuts(self, request: SearchRequest) -> Sequence[Mapping[str, Cuts]]:
        """Return the cuts of `search`, and other cuts with nearly as low an objective, if the mode
        has any; the predictor of full plans picks one."""
        return [self.search(request)]

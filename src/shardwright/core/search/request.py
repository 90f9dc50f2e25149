"""What a search is asked and what it answers."""

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
"""For each operator that is cut the axes that cut each of its factors, most significant first."""


@dataclass(frozen=True)
class Pricing:
    """What a search by time counts.

    Args:
        stages: number of pipeline stages, each with the device matrix.
        micro_batches: how many of the graph's batches make up a step.
        sharing: over how many devices optimizer state is sharded, which share the optimizer's
            step; -1 for all that hold a parameter whole, None if it is not sharded.
    """

    cluster: Cluster
    stages: int = 1
    micro_batches: int = 1
    sharing: int | None = None

    def parameter_weight(self, mem_coeff: float) -> float:
        """What a second counts in which parameters are gathered or updated or their gradients are
        reduced: less below the default, so that devices rather keep all parameters."""
        return min(1.0, mem_coeff / DEFAULT_MEM_COEFF)

    def seconds_per_parameter_byte(self, mem_coeff: float) -> float:
        """Seconds that a byte of parameters counts which a device keeps: those in which `mem_coeff`
        bytes are sent over the fastest link."""
        return mem_coeff / max(level.bandwidth for level in self.cluster.levels)


@dataclass(frozen=True)
class SearchRequest:
    """A model whose operators are to be cut on the axes of a device mesh.

    Args:
        pinned: cuts of operators that are kept as they are; the others are decided around them.
        outputs: the axes of each output of the operators whose output layouts are fixed.
        arrivals: the axes of each model input that does not arrive whole.
        pricing: what counts where seconds on a cluster do; None where the symbolic cost does.
        mem_coeff: weighs the memory of parameters. Small values favor data parallelism, large ones
            model parallelism, tiny ones no cut at all. With `pricing` a byte that a device keeps
            counts as `mem_coeff` bytes sent over the fastest link, and below the default, what is
            done once a step for parameters counts less.
        order: in which the symbolic search decides operators with a cost on an axis: the heaviest
            first, or as they stand in the graph; in both, embeddings come after the contractions.
        log_costs: whether a search by costs writes those of every choice to the logger
            `shardwright.search`.
        on_share: is told the share of a search by seconds that is done; others take less than one.

    Raises:
        StrategyError: if a pinned operator is unknown.
    """

    graph: Graph
    mesh: DeviceMatrix
    pinned: Mapping[str, Cuts] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)
    arrivals: Mapping[str, CutAxes] = field(default_factory=dict)
    pricing: Pricing | None = None
    mem_coeff: float = DEFAULT_MEM_COEFF
    order: str = "weight"
    log_costs: bool = False
    on_share: OnShare = field(default=ignore_share, compare=False, repr=False)

    def __post_init__(self) -> None:
        unknown = [name for name in self.pinned if name not in self.graph.by_name]
        if unknown:
            nearest = get_close_matches(unknown[0], self.graph.by_name, n=3, cutoff=0.3)
            hint = f"; nearest to {unknown[0]!r}: {', '.join(nearest)}" if nearest else ""
            raise StrategyError(
                f"pinned operators are not in the model: {', '.join(unknown)}{hint}"
            )


class SearchMode(ABC):
    """One way to decide the cuts of all operators; `search.modes.MODES` lists them.

    Attributes:
        name: as users write it.
        takes_pins: whether operators may be pinned; else it decides every operator itself.
        takes_pricing: whether it weighs `mem_coeff`, and seconds where `pricing` is there.
        requires_pricing: whether it weighs nothing but seconds.
    """

    name: ClassVar[str]
    takes_pins: ClassVar[bool] = True
    takes_pricing: ClassVar[bool] = False
    requires_pricing: ClassVar[bool] = False

    @abstractmethod
    def search(self, request: SearchRequest) -> Mapping[str, Cuts]:
        """The axes that cut the factors of each operator; one that is missing is not cut.

        Raises:
            StrategyError: if the mode cannot decide the model on the mesh of the request.
        """

    def searches(self, request: SearchRequest) -> Sequence[Mapping[str, Cuts]]:
        """What `search` returns, and perhaps others that are as good as far as the search knows."""
        return [self.search(request)]

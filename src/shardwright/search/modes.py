"""The ways in which operators are decided, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.constraints import ResolvedConstraints
from shardwright.errors import IndivisibleError, StrategyError
from shardwright.graph.graph import Graph
from shardwright.rules.rule import Cuts
from shardwright.search.baselines import data_parallel, semi_auto, stand_alone
from shardwright.search.by_time.exact import search_exactly
from shardwright.search.by_time.search import search_by_time
from shardwright.search.propagation.propagation import propagate
from shardwright.search.recursive.search import search_recursively

logger = logging.getLogger("shardwright.search")

Search = Callable[[Graph, ResolvedConstraints, Mapping[str, Any]], Mapping[str, Cuts]]


def _recursive(
    graph: Graph, fixed: ResolvedConstraints, options: Mapping[str, Any]
) -> Mapping[str, Cuts]:
    if options["pricing"] is not None:
        return search_by_time(
            graph,
            fixed.mesh,
            options["pricing"],
            pinned=fixed.cuts,
            outputs=fixed.outputs,
            arrivals=options["arrivals"],
        )
    try:
        return search_recursively(
            graph,
            fixed.mesh,
            pinned=fixed.cuts,
            mem_coeff=options["mem_coeff"],
            order=options["order"],
            log_costs=options["log_costs"],
        )
    except IndivisibleError as error:
        # A plan that works on any number of devices, as the search by time finds it.
        logger.warning("every device computes the whole: %s", error)
        return {}


def _exact(
    graph: Graph, fixed: ResolvedConstraints, options: Mapping[str, Any]
) -> Mapping[str, Cuts]:
    found = search_exactly(
        graph,
        fixed.mesh,
        options["pricing"],
        pinned=fixed.cuts,
        outputs=fixed.outputs,
        arrivals=options["arrivals"],
    )
    logger.info("the plan is within %.3g%% of the optimum", 100 * found.gap)
    return found.cuts


MODES: dict[str, Search] = {
    "recursive_programming": _recursive,
    "exact": _exact,
    "sharding_propagation": lambda graph, fixed, options: propagate(
        graph, fixed.mesh, fixed.cuts, fixed.outputs
    ),
    "semi_auto": lambda graph, fixed, options: semi_auto(graph, fixed.mesh, fixed.cuts),
    "data_parallel": lambda graph, fixed, options: data_parallel(graph, fixed.mesh),
    "stand_alone": lambda graph, fixed, options: stand_alone(graph, fixed.mesh),
}

WITHOUT_PINS = ("data_parallel", "stand_alone")
"""Modes that decide every operator themselves."""


def check_takes_pins(mode: str, pinned: Mapping[str, object]) -> None:
    """Raises:
    StrategyError: if operators are pinned in a mode that decides all of them itself.
    """
    if pinned and mode in WITHOUT_PINS:
        names = ", ".join(list(pinned)[:5]) + (" …" if len(pinned) > 5 else "")
        valid = ", ".join(name for name in MODES if name not in WITHOUT_PINS)
        raise StrategyError(
            f"mode={mode!r} decides every operator itself, but shard has pinned {names};"
            f" modes that take pins are {valid}"
        )

"""The memory of a named cluster's devices as the limit of a plan whose user gives none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from shardwright.core.cost.memory import binary, least_memory
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.options import NO_LIMIT, PlanOptions
from shardwright.errors import MemoryLimitError

log = logging.getLogger("shardwright.search")


def within_device_memory(
    options: PlanOptions, decide: Callable[[PlanOptions], Candidate]
) -> Candidate:
    """What `decide` returns without a limit if that fits into the devices of the named cluster,
    else what it returns with their memory as the limit.

    Args:
        options: if they give a limit, or no cluster that has one, `decide` is called with them.

    Raises:
        MemoryLimitError: nothing fits; says the smallest limit that would do.
    """
    limit = options.default_limit
    if limit is None:
        return decide(options)
    requested = decide(replace(options, memory_limit=NO_LIMIT))
    needed = max(least_memory(requested.partitioned, options.optimizer))
    if needed <= limit:
        needed = requested.memory().peak
    if needed <= limit:
        return requested
    cluster = options.known_cluster.name
    try:
        fitted = decide(replace(options, memory_limit=limit))
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"{error}; the limit is the memory of a device of cluster {cluster!r}, and"
            " memory_limit='none' plans without one",
            error.needed,
        ) from None
    # A search is expected to shard and recompute; by hand the user has said what to do.
    log.log(
        logging.INFO if options.weighs_memory else logging.WARNING,
        "as requested a device needs at least %s, but one of cluster %r has %s: planned with %s;"
        " memory_limit='none' plans it as requested",
        binary(needed),
        cluster,
        binary(limit),
        fitted.options.in_words(bool(fitted.decisions.recompute)),
    )
    return fitted

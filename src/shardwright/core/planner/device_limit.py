"""The device memory of the named cluster as the default memory limit."""

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
    """Plan without a limit, and again with the cluster's device memory as limit if that result
    does not fit into it. Options with an explicit limit or without a cluster are planned once.

    Args:
        decide: returns the best candidate for given options.

    Raises:
        MemoryLimitError: no plan fits; names the smallest limit that one would fit.
    """
    limit = options.default_limit
    if limit is None:
        return decide(options)
    requested = decide(replace(options, memory_limit=NO_LIMIT))
    # The lower bound needs no dry run; only where it does not rule the plan out is one made.
    needed = max(least_memory(requested.partitioned, options.optimizer))
    if needed <= limit:
        needed = requested.memory().peak
    if needed <= limit:
        return requested
    cluster = options.resolved_cluster.name
    try:
        fitted = decide(replace(options, memory_limit=limit))
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"{error}; the limit is the device memory of cluster {cluster!r}:"
            " memory_limit='none' plans without one",
            error.needed,
        ) from None
    # A search may shard and recompute as it likes. In the other modes the user has decided, so a
    # plan that deviates is a warning.
    log.log(
        logging.INFO if options.weighs_memory else logging.WARNING,
        "as requested a device needs at least %s, but one of cluster %r has %s: planned with %s\n"
        "to plan as requested, set memory_limit='none'",
        binary(needed),
        cluster,
        binary(limit),
        fitted.options.in_words(bool(fitted.decisions.recompute)),
    )
    return fitted

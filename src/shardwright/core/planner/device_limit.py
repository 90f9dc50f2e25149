"""Use the device memory of the named cluster as the default memory limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from shardwright.core.cost.memory import bytes_text
from shardwright.core.cost.memory_bounds import memory_lower_bounds
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.options import NO_LIMIT, PlanOptions
from shardwright.errors import MemoryLimitError

log = logging.getLogger("shardwright.search")


def candidate_within_device_memory(
    options: PlanOptions, best_candidate: Callable[[PlanOptions], Candidate]
) -> Candidate:
    """Return the best candidate that fits into the device memory of the named cluster.

    The model is planned without a memory limit. If the result does not fit into the cluster's
    devices, the model is planned again with their memory as the limit. Options with an explicit
    limit or without a named cluster are planned once, unchanged.

    Args:
        best_candidate: function that returns the best candidate with given options.

    Raises:
        MemoryLimitError: if no plan fits; contains the smallest memory limit with which a plan
            fits.
    """
    limit = options.default_limit
    if limit is None:
        return best_candidate(options)
    # As requested first: a search under a limit also tries other options, which a plan that fits
    # does not need.
    requested = best_candidate(replace(options, memory_limit=NO_LIMIT))
    # The lower bound needs no dry run; a dry run is made only if the bound is within the limit.
    needed = max(memory_lower_bounds(requested.partitioned, options.optimizer))
    if needed <= limit:
        needed = requested.memory().peak
    if needed <= limit:
        return requested
    cluster = options.resolved_cluster.name
    try:
        fitted = best_candidate(replace(options, memory_limit=limit))
    except MemoryLimitError as error:
        # The new error has the text of the old one, so a chain would print it twice.
        raise MemoryLimitError(
            f"{error}; the limit is the device memory of cluster {cluster!r}: to plan without it,"
            " set memory_limit='none'",
            error.needed,
        ) from None
    # A mode that weighs memory leaves sharding and recomputation to the search. In all other modes
    # the user has decided both, so that a plan with further changes deserves a warning.
    log.log(
        logging.INFO if options.weighs_memory else logging.WARNING,
        "the requested plan needs at least %s per device, but a device of cluster %r has %s:"
        " planned with %s\nto plan as requested, set memory_limit='none'",
        bytes_text(needed),
        cluster,
        bytes_text(limit),
        fitted.options.describe(bool(fitted.decisions.recompute)),
    )
    return fitted

"""The default search mode: axis by axis, by predicted time on a cluster, else by symbolic cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from shardwright.core.search.by_time.search import candidates_by_time
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.core.search.shard_uncosted_ops import with_uncosted_ops_sharded
from shardwright.errors import IndivisibleError

logger = logging.getLogger("shardwright.search")


class RecursiveProgramming(SearchMode):
    """Search mode that decides one axis after another; its search time grows with the logarithm of
    the number of devices."""

    name: ClassVar[str] = "recursive_programming"
    takes_cost_model: ClassVar[bool] = True

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return self.candidate_cuts(request)[0]

    def candidate_cuts(self, request: SearchRequest) -> Sequence[CutsOfGraph]:
        # Seconds already count operators without a symbolic cost, so none of them is sharded
        # afterwards.
        if request.timed_step is not None:
            return candidates_by_time(request)
        try:
            return with_uncosted_ops_sharded(request, search_recursively(request))
        except IndivisibleError as error:
            # Replicated, as the search by time decides in the same case.
            logger.warning("all operators are replicated: %s", error)
            return [{}]

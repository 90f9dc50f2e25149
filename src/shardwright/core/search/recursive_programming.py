"""The default mode: axis after axis, by seconds where a cluster is known, else symbolically."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from shardwright.core.search.by_time.search import searches_by_time
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.core.search.shard_uncosted_ops import with_uncosted_ops_sharded
from shardwright.errors import IndivisibleError

logger = logging.getLogger("shardwright.search")


class RecursiveProgramming(SearchMode):
    """Decides on one axis after the other, so that its work grows with the logarithm of devices."""

    name: ClassVar[str] = "recursive_programming"
    takes_pricing: ClassVar[bool] = True

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return self.searches(request)[0]

    def searches(self, request: SearchRequest) -> Sequence[CutsOfGraph]:
        if request.pricing is not None:
            return searches_by_time(request)
        try:
            return with_uncosted_ops_sharded(request, search_recursively(request))
        except IndivisibleError as error:
            # A plan that works on any number of devices, as the search by time finds it.
            logger.warning("every device computes the whole: %s", error)
            return [{}]

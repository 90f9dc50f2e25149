"""The smallest bound of several candidates."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

from shardwright.core.planner.candidate_bound import CandidateBound, min_simulated


@dataclass
class Bound:
    """A bound that records whether its pipeline was simulated."""

    unsimulated: float
    seconds: float
    was_simulated: bool = field(default=False)

    @property
    def simulated(self) -> float:
        self.was_simulated = True
        return self.seconds


def test_only_pipelines_that_may_be_the_fastest_are_simulated() -> None:
    draw = random.Random(0)
    for _ in range(50):
        bounds = [Bound(low := draw.random(), low + draw.random()) for _ in range(6)]
        smallest = min_simulated(cast(list[CandidateBound], bounds))
        assert smallest == min(each.seconds for each in bounds)
        for each in bounds:
            assert each.was_simulated == (each.unsimulated <= smallest)


def test_without_candidates_no_bound_is_known() -> None:
    assert min_simulated(cast(Any, [])) == float("inf")

"""Which options the search under a memory limit searches, and which it leaves out."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.planner import group_search
from shardwright.core.planner.group_search import next_mem_coeff_bound
from shardwright.core.search.by_time.search import TimedSearch
from shardwright.progress import ignore_share


def plan(**options: Any) -> sw.Plan:
    """Of four layers on eight devices that cannot have the optimizer state of all."""
    with torch.device("meta"):
        net = sw.WithLoss(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), nn.MSELoss())
        batch = torch.empty(8192, 4096), torch.empty(8192, 4096)
    return sw.plan(net, batch, devices=8, cluster="h100", **options)


def test_options_without_zero_are_searched_only_if_they_may_be_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard_sizes: list[int | None] = []
    run = TimedSearch.run

    def counted(search: TimedSearch, on_share: Any = ignore_share) -> Any:
        shard_sizes.append(search.timed_step.optimizer_shard_size)
        return run(search, on_share)

    monkeypatch.setattr(TimedSearch, "run", counted)
    found = plan(memory_limit="1GiB")
    few = shard_sizes.count(None)
    shard_sizes.clear()
    monkeypatch.setattr(group_search, "UNSHARDED_BOUND", 0.0)
    thorough = plan(memory_limit="1GiB")
    assert found.step_time == thorough.step_time
    assert few < shard_sizes.count(None)


@pytest.mark.parametrize(
    ("lowest", "previous", "expected"),
    [
        (2.0, 1.0, 0.97 * 4.0),
        (2.0, inf, 0.97 * 2.0),
        # The objective of the search is simpler than the prediction.
        (2.0, 2.1, 0.97 * 2.0),
        (inf, 1.0, 0.0),
    ],
)
def test_the_next_mem_coeff_costs_more_than_the_last_one_did(
    lowest: float, previous: float, expected: float
) -> None:
    assert next_mem_coeff_bound(lowest, previous) == pytest.approx(expected)

"""A search that takes long reports its best plan so far, and goes on."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.planner import search_queue
from shardwright.core.planner.slow_search import FIRST_REPORT_SECONDS, ReportTimes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_reports_are_due_after_twice_the_time_each() -> None:
    now = [0.0]
    times = ReportTimes(lambda: now[0])
    assert times.due() is None
    due = []
    for second in range(0, 601, 10):
        now[0] = float(second)
        if times.due() is not None:
            due.append(second)
    assert due == [FIRST_REPORT_SECONDS, 2 * FIRST_REPORT_SECONDS, 4 * FIRST_REPORT_SECONDS]


def test_the_best_plan_so_far_is_reported_and_the_plan_is_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        graph = sw.capture(Net(), (torch.empty(4096, 64),))
    options = {"devices": 4, "cluster": "a100"}
    # Between the peak without a limit and the least that plans need, 0.74 of it.
    limit = int(0.8 * sw.plan(graph, **options).memory.peak)
    expected = sw.plan(graph, memory_limit=limit, **options)
    monkeypatch.setattr(search_queue.ReportTimes, "due", lambda _: 123.0)
    with caplog.at_level(logging.WARNING, "shardwright.search"):
        found = sw.plan(graph, memory_limit=limit, **options)
    assert found.step == expected.step
    # Other tests may have left the logger at a lower level.
    records = [each for each in caplog.records if each.levelno >= logging.WARNING]
    messages = [each.message for each in records if each.name == "shardwright.search"]
    assert messages[0].startswith("the search has taken 123 s and goes on: no plan is known to fit")
    # From the first report with candidates on, although the bounds of others are lower.
    assert all("the best plan so far" in each for each in messages[1:])
    assert f"the best plan so far takes {found.step_time:.4g} s per step" in messages[-1]

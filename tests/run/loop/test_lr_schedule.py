"""Learning rates over a run."""

from __future__ import annotations

from math import cos, pi

import pytest

from shardwright.run.loop.lr_schedule import LRSchedule


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (LRSchedule("constant", 1.0, warmup_steps=4), [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        (
            LRSchedule("constant", 1.0, start=0.5, warmup_steps=4),
            [0.5, 0.625, 0.75, 0.875, *[1] * 6],
        ),
        (LRSchedule("linear", 1.0, end=0.5, total_steps=5), [1, 0.9, 0.8, 0.7, 0.6, *[0.5] * 5]),
        (
            LRSchedule("polynomial", 1.0, power=2.0, total_steps=4),
            [1, 0.5625, 0.25, 0.0625, *[0.0] * 6],
        ),
        (
            LRSchedule("cosine", 2.0, warmup_ratio=0.2),
            [0, 1, *(1 + cos(pi * i / 8) for i in range(8))],
        ),
    ],
)
def test_the_rate_rises_and_falls_as_its_kind_says(
    schedule: LRSchedule, rates: list[float]
) -> None:
    assert [schedule.rate(step, 10) for step in range(10)] == pytest.approx(rates)

"""Losses in TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwright.errors import ConfigError
from shardwright.run.loop.trackers import check_trackers, open_trackers


def test_a_tracker_that_is_not_installed_is_an_error_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_trackers([])
    monkeypatch.setattr("shardwright.run.loop.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb is not installed\n.*'shardwright\[wandb\]'"):
        check_trackers(["wandb"])


def test_weights_and_biases_gets_each_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Run:
        def __enter__(self) -> Run:
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("end")

        def log(self, numbers: dict[str, float], step: int) -> None:
            calls.append((step, numbers))

    wandb = ModuleType("wandb")
    vars(wandb)["init"] = lambda **options: calls.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with open_trackers(["wandb"], tmp_path, {"train": {"steps": 3}}, start=4) as track:
        track(5, {"loss": 1.5})
    first, *others = calls
    assert first == {"dir": str(tmp_path), "config": {"train": {"steps": 3}}, "resume": "allow"}
    assert others == [(5, {"loss": 1.5}), "end"]


def test_tensorboard_has_each_number_once_through_restarts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 2):
        with open_trackers(["tensorboard"], tmp_path, {}, start) as track:
            for step in range(start + 1, start + 4):
                track(step, {"loss": step + start / 10})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(each.step, each.value) for each in events.Scalars("loss")]
    assert points == [
        (step, pytest.approx(value))
        for step, value in ((1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2), (5, 5.2))
    ]

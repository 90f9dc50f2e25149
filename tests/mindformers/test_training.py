"""Optimizer, learning rate, recomputation, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from mindformers.files import run_of
from shardwright.errors import ConfigError
from shardwright.run.config.schema import ScheduleSection


@pytest.mark.parametrize(
    ("section", "schedule"),
    [
        (None, ScheduleSection(kind="constant")),
        (
            {"type": "CosineWithWarmUpLR", "warmup_ratio": 0.03, "total_steps": -1},
            ScheduleSection(kind="cosine", warmup_ratio=0.03),
        ),
        (
            {"type": "polynomial", "warmup_steps": 20, "lr_end": "1e-6", "total_steps": 500},
            ScheduleSection(kind="polynomial", end=1e-6, warmup_steps=20, total_steps=500),
        ),
        (
            {"type": "linear", "warmup_steps": 4, "warmup_lr_init": "1e-6"},
            ScheduleSection(kind="linear", start=1e-6, warmup_steps=4),
        ),
        ({"type": "linear", "warmup_steps": 0}, ScheduleSection(kind="linear")),
    ],
)
def test_the_schedule_is_that_of_the_file(section: Any, schedule: ScheduleSection) -> None:
    optimizer = run_of(lr_schedule=section).training.optimizer
    assert optimizer["learning_rate"] == 1e-4
    assert ScheduleSection(**optimizer["schedule"]) == schedule


def test_the_rate_of_the_schedule_comes_before_that_of_the_optimizer() -> None:
    run = run_of(lr_schedule={"type": "CosineWithWarmUpLR", "learning_rate": 2e-5})
    assert run.training.optimizer["learning_rate"] == 2e-5
    assert any("learning_rate 2e-05 overrides" in note for note in run.notes)


def test_what_is_given_as_text_becomes_a_number() -> None:
    found = run_of(optimizer__eps="1e-8", optimizer__weight_decay="0.1").training.optimizer
    assert (found["eps"], found["weight_decay"]) == (1e-8, 0.1)


def test_gradients_are_clipped_where_it_is_asked_for() -> None:
    assert run_of().training.optimizer["clip_norm"] is None
    clips = run_of(runner_wrapper__use_clip_grad=True)
    assert clips.training.optimizer["clip_norm"] == 1.0
    both = run_of(runner_wrapper={"use_clip_grad": True, "max_grad_norm": 0.5})
    assert both.training.optimizer["clip_norm"] == 0.5


@pytest.mark.parametrize("kind", ["CheckpointMonitor", "CheckpointMointor"])
def test_checkpoints_are_those_of_the_monitor(kind: str) -> None:
    monitor = {"type": kind, "save_checkpoint_steps": 100, "async_save": True}
    found = run_of(callbacks=[{"type": "MFLossMonitor"}, monitor], output_dir="out").training
    checkpoint = found.train["checkpoint"]
    assert (checkpoint["folder"], checkpoint["every"], checkpoint["async"]) == ("out", 100, True)
    without = run_of(callbacks=[{"type": "MFLossMonitor"}]).training
    assert "checkpoint" not in without.train


def test_no_checkpoints_are_saved_every_0_steps() -> None:
    monitor = {"type": "CheckpointMonitor", "save_checkpoint_steps": 0}
    assert "checkpoint" not in run_of(callbacks=[monitor]).training.train
    with pytest.raises(ConfigError, match=r"callbacks\[0\].save_checkpoint_seconds: .* by time"):
        run_of(callbacks=[monitor | {"save_checkpoint_seconds": 60}])


def test_optimizers_have_their_other_names_too() -> None:
    for name in ("adamw", "fused_adamw", "fp32_adamw"):
        assert run_of(optimizer__type=name).training == run_of().training

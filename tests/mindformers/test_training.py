"""Optimizer, learning rate, recomputation, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from mindformers.files import run_of
from shardwright.mindformers.training import Recomputation
from shardwright.run.loop.lr_schedule import LRSchedule


@pytest.mark.parametrize(
    ("section", "schedule"),
    [
        (None, LRSchedule("constant", 1e-4)),
        (
            {"type": "CosineWithWarmUpLR", "warmup_ratio": 0.03, "total_steps": -1},
            LRSchedule("cosine", 1e-4, warmup_ratio=0.03),
        ),
        (
            {"type": "polynomial", "warmup_steps": 20, "lr_end": "1e-6", "total_steps": 500},
            LRSchedule("polynomial", 1e-4, end=1e-6, warmup_steps=20, total_steps=500),
        ),
        ({"type": "linear", "warmup_steps": 0}, LRSchedule("linear", 1e-4)),
    ],
)
def test_the_learning_rate_is_that_of_the_schedule(section: Any, schedule: LRSchedule) -> None:
    assert run_of(lr_schedule=section).training.optimizer.schedule == schedule


def test_the_rate_of_the_schedule_comes_before_that_of_the_optimizer() -> None:
    run = run_of(lr_schedule={"type": "CosineWithWarmUpLR", "learning_rate": 2e-5})
    assert run.training.optimizer.schedule.peak == 2e-5
    assert any("learning_rate 2e-05 overrides" in note for note in run.notes)


def test_what_is_given_as_text_becomes_a_number() -> None:
    found = run_of(optimizer__eps="1e-8", optimizer__weight_decay="0.1").training.optimizer
    assert (found.eps, found.weight_decay) == (1e-8, 0.1)


def test_gradients_are_clipped_where_it_is_asked_for() -> None:
    assert run_of().training.optimizer.clip_norm is None
    assert run_of(runner_wrapper__use_clip_grad=True).training.optimizer.clip_norm == 1.0
    both = run_of(runner_wrapper={"use_clip_grad": True, "max_grad_norm": 0.5})
    assert both.training.optimizer.clip_norm == 0.5


def test_recomputation_is_as_said() -> None:
    assert run_of().training.recompute == Recomputation()
    section = {
        "recompute": True,
        "select_recompute": True,
        "mp_comm_recompute": False,
        "parallel_optimizer_comm_recompute": True,
    }
    found = run_of(recompute_config=section).training.recompute
    assert found == Recomputation(True, True, communication=False, gathers=True)


@pytest.mark.parametrize("kind", ["CheckpointMonitor", "CheckpointMointor"])
def test_checkpoints_are_those_of_the_monitor(kind: str) -> None:
    monitor = {"type": kind, "save_checkpoint_steps": 100, "async_save": True}
    found = run_of(callbacks=[{"type": "MFLossMonitor"}, monitor], output_dir="out").training
    assert found.checkpoints is not None
    assert (found.checkpoints.folder, found.checkpoints.every) == ("out", 100)
    assert found.checkpoints.asynchronous
    assert run_of(callbacks=[{"type": "MFLossMonitor"}]).training.checkpoints is None

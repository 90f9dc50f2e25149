"""Files that cannot be written: the cause is in the message, and earlier files stay the same."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.checkpoint.folder_lock import lock_folders
from shardwright.errors import LockError
from shardwright.run.launch.log_folder import LogFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Context in which writing beyond a position fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def plan_of(net: nn.Module) -> sw.Plan:
    return sw.plan(net, (torch.zeros(4, 64),), devices=2)


WRITERS: dict[str, Callable[[nn.Module, Path], object]] = {
    "step-1": lambda net, path: sw.save_checkpoint(path.parent, net, position=sw.Position(1)),
    "net.pt": sw.save_state_dict,
    "net.safetensors": sw.save_state_dict,
    "plan.json": lambda net, path: plan_of(net).save(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_write_says_why_and_leaves_the_earlier_file(name: str, tmp_path: Path) -> None:
    net = nn.Linear(64, 64)
    WRITERS[name](net, tmp_path / name)
    before = contents(tmp_path)
    error = OSError if name == "plan.json" else sw.CheckpointError
    limit = 1000 if name == "plan.json" else 8192
    with no_file_above(limit), pytest.raises(error, match="File too large") as caught:
        WRITERS[name](net, tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before
    assert all(".partial" in path or path == ".lock" for path in after.keys() - before.keys())


def test_a_folder_that_cannot_be_written_is_refused_when_it_is_locked(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("left by a killed run")
    with (
        no_file_above(100),
        pytest.raises(LockError, match=rf"cannot write to {tmp_path}: File too large\nuse a"),
        lock_folders(tmp_path),
    ):
        pytest.fail("training has begun")
    with lock_folders(tmp_path):
        pass


def test_a_step_log_survives_a_failure_while_a_resumed_run_clears_its_logs(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path)
    logs.clear(num_ranks=2)
    logs.steps(0).write_text("a line\n")
    logs.stdout(1).write_text("old")
    logs.clear(num_ranks=1, keep_steps=True)
    assert contents(tmp_path) == {"1/rank.0/steps.jsonl": b"a line\n"}
    logs.clear(num_ranks=1)
    assert contents(tmp_path) == {}

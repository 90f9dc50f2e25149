"""Files that cannot be written: the cause is in the message, and earlier files stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from features.full_disk_ranks import CHECKS, contents, no_file_above
from shardwright.core.checkpoint.folder_lock import lock_folders
from shardwright.errors import LockError
from shardwright.run.data.token_files import write_tokens
from shardwright.run.launch.log_folder import LogFolder
from torchrun import checks_on_ranks

test_full_disks_on_two_ranks = checks_on_ranks(CHECKS, 2)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def plan_of(net: nn.Module) -> sw.Plan:
    return sw.plan(net, (torch.zeros(4, 64),), devices=2)


WRITERS: dict[str, Callable[[nn.Module, Path], object]] = {
    "step-1": lambda net, path: sw.save_checkpoint(path.parent, net, position=sw.Position(1)),
    "net.pt": sw.save_state_dict,
    "net.safetensors": sw.save_state_dict,
    "plan.json": lambda net, path: plan_of(net).save(path),
    "tokens.bin": lambda net, path: write_tokens(path, np.arange(20_000, dtype=np.uint16)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_write_says_why_and_leaves_the_earlier_file(name: str, tmp_path: Path) -> None:
    net = nn.Linear(64, 64)
    WRITERS[name](net, tmp_path / name)
    before = contents(tmp_path)
    error = {"plan.json": OSError, "tokens.bin": sw.DataError}.get(name, sw.CheckpointError)
    limit = 1000 if name == "plan.json" else 8192
    with no_file_above(limit), pytest.raises(error, match="File too large") as caught:
        WRITERS[name](net, tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before
    assert all(".partial" in path or path == ".lock" for path in after.keys() - before.keys())


def test_tokens_whose_checksums_cannot_be_written_leave_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_tokens(path, np.arange(4, dtype=np.uint16))
    before = contents(tmp_path)
    with no_file_above(20), pytest.raises(sw.DataError, match=r"tokens\.bin .*: File too large\n"):
        write_tokens(path, np.arange(5, dtype=np.uint16))
    assert contents(tmp_path) == before
    write_tokens(path, np.arange(0, dtype=np.uint16))
    assert path.stat().st_size == 0


def test_a_folder_that_cannot_be_written_is_refused_when_it_is_locked(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on a killed machine")
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

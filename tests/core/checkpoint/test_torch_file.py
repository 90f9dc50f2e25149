"""Files of `torch.save`: each failure is one error with the file and the cause."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from features.full_disk_ranks import contents, no_file_above
from shardwright.core.checkpoint.torch_file import read_torch_file, write_torch_file
from shardwright.errors import CheckpointError


class _Code:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.pt"
    write_torch_file({"step": 1}, file)
    before = contents(tmp_path)
    with no_file_above(4096), pytest.raises(CheckpointError, match=r"r\.pt cannot .*: File too la"):
        write_torch_file({"step": torch.zeros(10_000)}, file)
    assert contents(tmp_path) == before
    assert read_torch_file(file) == {"step": 1}


def test_what_cannot_be_read_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "optimizer.pt"
    write_torch_file({"step": torch.zeros(100)}, file)
    content = file.read_bytes()
    damaged = [b"", b"text", content[:-200], content[200:]]
    torch.save(_Code(), file)
    for each in (*damaged, file.read_bytes()):
        file.write_bytes(each)
        for mapped in (False, True):
            with pytest.raises(CheckpointError, match=r"optimizer\.pt: cannot be read as pt"):
                read_torch_file(file, mapped=mapped)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: cannot be read as pt"):
        read_torch_file(file)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_nothing_is_written_through_what_is_in_place_of_the_new_file(
    tmp_path: Path, kind: str
) -> None:
    other, file = tmp_path / "other", tmp_path / "weights.pt"
    other.write_text("precious")
    partial = tmp_path / ".weights.pt.partial"
    if kind == "link":
        partial.symlink_to(other)
    elif kind == "hard link":
        os.link(other, partial)
    else:
        os.mkfifo(partial)
    write_torch_file({}, file)
    assert other.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "weights.pt"]

"""A rehearsal of a configuration needs no data of the run, and no memory of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import DataError
from shardwright.run.config.rehearse import rehearse_run
from shardwright.run.config.run import Run

CONFIG = """
model: {name: llama2_7b_tiny}
data: {name: text, seq_length: 64, batch_size: 512%s}
"""


def run_of(folder: Path, more: str = "") -> Run:
    file = folder / "run.yaml"
    file.write_text(CONFIG % more)
    return Run.from_file(file)


def test_a_batch_that_the_built_in_story_does_not_fill_is_rehearsed(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(DataError, match="less than one batch of 512"):
        len(run.batches)
    assert rehearse_run(run, run.plan(8), ranks=(7,)).passes()


def test_a_text_of_the_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("once upon a time " * 10)
    run = run_of(tmp_path, ", path: short.txt")
    with pytest.raises(DataError, match="less than one batch of 512"):
        rehearse_run(run, run.plan(1), ranks=(0,))

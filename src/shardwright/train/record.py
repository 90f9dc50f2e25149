"""The record of a run's steps, one JSON line each, through restarts: every step once."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from shardwright.train.position import Position
from shardwright.train.steps import Step


def continued(path: Path, start: Position) -> TextIO:
    """The file at `path`, open for the lines of the steps from `start` on.

    Lines of later steps, which are done again, and a line that a crash has cut are left out. The
    file is replaced by one without them, so that it never holds a step twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    steps = [(line, Step.from_json(line)) for line in whole]
    kept = [line for line, s in steps if (s.epoch, s.step) < (start.epoch, start.batch)]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(kept))
    partial.replace(path)
    return path.open("a", buffering=1)

"""What one training step reports: the documented line, and a JSON line for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from shardwright.train.position import Position


@dataclass(frozen=True)
class StepRecord:
    """One finished training step.

    `samples_per_second` counts the whole batch, over all devices.
    """

    epoch: int
    step: int
    loss: float
    samples_per_second: float

    @property
    def line(self) -> str:
        """The documented line; the loss in single precision, in as few digits as name it."""
        return f"epoch: {self.epoch}, step: {self.step}, loss is {np.float32(self.loss)!s}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> StepRecord:
        return StepRecord(**json.loads(text))


def continued(path: Path, start: Position) -> TextIO:
    """The file at `path`, open for the lines of the steps from `start` on.

    Lines of later steps, which are done again, and a line that a crash has cut are left out. The
    file is replaced by one without them, so that it never holds a step twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    steps = [(line, StepRecord.from_json(line)) for line in whole]
    kept = [line for line, s in steps if (s.epoch, s.step) < (start.epoch, start.batch)]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(kept))
    partial.replace(path)
    return path.open("a", buffering=1)

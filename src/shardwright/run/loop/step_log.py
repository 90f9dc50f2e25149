"""The record of a training step: a line for people, a JSON line for programs, the file of these."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from shardwright.core.checkpoint.position import Position


@dataclass(frozen=True)
class StepRecord:
    """One finished training step.

    Args:
        epoch, step: counted from 0, the step within its epoch.
        loss: the mean loss of the global batch.
        samples_per_second: of the global batch, over all devices.
        evaluation_loss: the mean loss on other data after the step, if it was computed.
        learning_rate: of the step; of several groups of parameters the first one's.
        tokens_per_second: likewise, of a model that reads tokens.
        utilization: the share of the peak of all devices that the model's matrix products need, if
            the plan was made for a cluster.
        peak_memory: bytes that the accelerator's allocator has given out at most so far, on rank 0.
        exposed_communication: seconds of the step that the computation of rank 0 waited for
            communication; in a pipeline also for the micro-batches of other stages.
    """

    epoch: int
    step: int
    loss: float
    samples_per_second: float
    evaluation_loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    utilization: float | None = None
    peak_memory: int | None = None
    exposed_communication: float | None = None

    @property
    def line(self) -> str:
        """The line that is printed; losses have the shortest digits of their float32 values."""
        line = f"epoch: {self.epoch}, step: {self.step}, loss is {np.float32(self.loss)!s}"
        if self.evaluation_loss is not None:
            line += f", evaluation loss is {np.float32(self.evaluation_loss)!s}"
        return line

    @property
    def numbers(self) -> dict[str, float]:
        """Those that are measured, by name."""
        return {
            k: v for k, v in asdict(self).items() if k not in ("epoch", "step") and v is not None
        }

    def to_json(self) -> str:
        return json.dumps({"epoch": self.epoch, "step": self.step, **self.numbers})

    @staticmethod
    def from_json(text: str) -> StepRecord:
        return StepRecord(**json.loads(text))


def open_step_log(path: Path, start: Position) -> TextIO:
    """Opens the step log at `path` to append the steps from `start` on.

    Lines of later steps, which will run again, and a line truncated by a crash are removed first,
    so that the log never has a step twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    complete = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    steps = [(line, StepRecord.from_json(line)) for line in complete]
    earlier = [line for line, s in steps if (s.epoch, s.step) < (start.epoch, start.batch)]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(earlier))
    partial.replace(path)
    return path.open("a", buffering=1)

"""Step records: printed as a line, and appended to a JSON Lines file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

import numpy as np
from pydantic import TypeAdapter, ValidationError

from shardwright.core.checkpoint.position import Position
from shardwright.errors import DataError
from shardwright.plain_data import parse_json, short_repr
from shardwright.text_files import read_text, write_text


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one finished training step.

    Args:
        epoch, step: index of the epoch, and of the step within its epoch, both from 0.
        loss: mean loss of the global batch.
        samples_per_second: throughput over all devices.
        evaluation_loss: mean loss on the evaluation data after the step; None if not evaluated.
        learning_rate: learning rate of the first parameter group.
        tokens_per_second: throughput over all devices; None unless samples are token sequences.
        utilization: model FLOPs utilization (MFU) of all devices, 0 to 1; None if the plan was made
            without a cluster.
        peak_memory: peak allocated bytes of the accelerator so far, on rank 0.
        exposed_communication: seconds for which rank 0's computation waited for communication,
            including pipeline bubbles.
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
        """Line for the console, with losses in the shortest form that identifies a float32."""
        line = f"epoch: {self.epoch}, step: {self.step}, loss is {np.float32(self.loss)!s}"
        if self.evaluation_loss is not None:
            line += f", evaluation loss is {np.float32(self.evaluation_loss)!s}"
        return line

    @property
    def metrics(self) -> dict[str, float]:
        """Measured metrics by name, without epoch and step."""
        return {
            k: v for k, v in asdict(self).items() if k not in ("epoch", "step") and v is not None
        }

    def to_json(self) -> str:
        return json.dumps({"epoch": self.epoch, "step": self.step, **self.metrics})

    @staticmethod
    def from_json(text: str, location: str = "step log") -> StepRecord:
        """Read a line of a step log.

        Args:
            text: the line.
            location: prefix of error messages, such as the name of the file.

        Raises:
            DataError: the line is not a record of a step.
        """
        values = parse_json(text, location, DataError)
        try:
            return _make_step_record_adapter().validate_python(values)
        except ValidationError:
            raise DataError(
                f"{location}: not the record of a step: {short_repr(text)}\n"
                "resume with another --log-dir, or remove the line"
            ) from None


# Cached, because pydantic compiles the schema of an adapter when it is created.
@cache
def _make_step_record_adapter() -> TypeAdapter[StepRecord]:
    return TypeAdapter(StepRecord)


def open_step_log(path: Path, start: Position) -> TextIO:
    """Open the step log at `path` to append the steps from `start` on.

    Removes the lines of later steps, which will run again and be logged again, and a last line
    truncated by a crash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = read_text(path, DataError, max_bytes=None) if path.exists() else ""
    complete = [line for line in content.splitlines(keepends=True) if line.endswith("\n")]
    steps = [
        (line, StepRecord.from_json(line, f"{path}, line {number}"))
        for number, line in enumerate(complete, start=1)
    ]
    earlier = [line for line, s in steps if (s.epoch, s.step) < (start.epoch, start.batch)]
    # Atomically, so that a crash here cannot lose the log.
    write_text(path, "".join(earlier))
    # Line by line, so that a crash loses no finished step.
    return path.open("a", buffering=1)

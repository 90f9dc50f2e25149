"""What one training step reports: the documented line, and a JSON line for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Step:
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
    def from_json(text: str) -> Step:
        return Step(**json.loads(text))

"""Every legal combination of the dimensions of hybrid parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from shardwright.core.partition.schedules import SCHEDULES

ROWS, MICRO_BATCHES, STEPS = 8, 4, 2
"""The second step is the first that has momentum, and parameters that a step has changed."""


@dataclass(frozen=True)
class Case:
    stages: int
    schedule: str
    level: str
    recompute: bool
    dtype: str

    @property
    def name(self) -> str:
        again = "recompute" if self.recompute else "keep"
        return f"{self.stages}-{self.schedule}-{self.level}-{again}-{self.dtype}"


PIPELINES = [
    (stages, name)
    for stages, (name, schedule) in product((2, 4), SCHEDULES.items())
    if schedule.min_micro_batches(stages) <= MICRO_BATCHES
]

CASES = tuple(
    Case(stages, schedule, level, recompute, dtype)
    for (stages, schedule), level, recompute, dtype in product(
        [(1, "1f1b"), *PIPELINES],
        ("off", "level1", "level2", "level3"),
        (False, True),
        ("fp64", "bf16"),
    )
)
"""A single stage has no order of stages. `fp64` computes as stored, in double precision, so that
equality is meant; `bf16` stores in single precision and computes in bfloat16."""

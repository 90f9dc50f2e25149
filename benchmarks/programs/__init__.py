"""Training programs as users write them, each to be run on one device and planned."""

from benchmarks.programs import around, forward_effects, habits, hooks, kinds, loops, outputs
from benchmarks.programs.program import PROGRAMS, Parallel, Program

__all__ = [
    "PROGRAMS",
    "Parallel",
    "Program",
    "around",
    "forward_effects",
    "habits",
    "hooks",
    "kinds",
    "loops",
    "outputs",
]

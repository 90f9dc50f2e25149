"""Training programs as users write them, each to be run on one device and planned."""

from benchmarks.programs import forward_effects, hooks, loops, outputs
from benchmarks.programs.program import PROGRAMS, Parallel, Program

__all__ = ["PROGRAMS", "Parallel", "Program", "forward_effects", "hooks", "loops", "outputs"]

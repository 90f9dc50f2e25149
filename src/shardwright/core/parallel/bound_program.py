"""Programs and training steps with the module tensors that they read and update."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.graph.graph import Graph
from shardwright.core.lower.program import Program
from shardwright.core.misuse.between_outputs import OutputsOffPath
from shardwright.core.parallel.module_tensors import ModuleTensors
from shardwright.core.parallel.train_step import TrainStep
from shardwright.core.runtime.devices import Devices


@dataclass(frozen=True)
class BoundProgram:
    """A program with the module tensors that it reads and updates.

    Args:
        recomputes: whether the backward pass recomputes some operators.
        draws_random_numbers: whether some operator draws random numbers, as dropout does.
        devices: this rank's view of the program's device matrix, which may have other axes than
            the plan's.
        off_path: watches outputs that would miss gradients of other outputs.
    """

    graph: Graph
    program: Program
    tensors: ModuleTensors
    recomputes: bool
    draws_random_numbers: bool
    devices: Devices
    off_path: OutputsOffPath


@dataclass(frozen=True)
class BoundStep:
    """A training step with the module tensors that it reads and updates."""

    step: TrainStep
    tensors: ModuleTensors

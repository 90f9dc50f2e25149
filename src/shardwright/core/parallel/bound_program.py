"""Programs and training steps, bound to the tensors of the module that they run for."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.graph.graph import Graph
from shardwright.core.lower.program import Program
from shardwright.core.misuse.between_outputs import OutputsOffPath
from shardwright.core.parallel.tensor_places import TensorPlaces
from shardwright.core.parallel.train_step import TrainStep
from shardwright.core.runtime.devices import Devices


@dataclass(frozen=True)
class BoundProgram:
    """A program and the tensors of the module that it reads and updates."""

    graph: Graph
    program: Program
    places: TensorPlaces
    recomputes: bool
    draws: bool
    devices: Devices
    off_path: OutputsOffPath


@dataclass(frozen=True)
class BoundStep:
    """A training step and the tensors of the module that it reads and updates."""

    step: TrainStep
    places: TensorPlaces

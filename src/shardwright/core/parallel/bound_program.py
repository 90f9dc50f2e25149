"""Programs and training steps with the module tensors that they read and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.graph.python_call import PythonCall
from shardwright.core.lower.program import Program
from shardwright.core.misuse.between_outputs import OutputsOffPath
from shardwright.core.misuse.paired_batch import BatchSizes
from shardwright.core.misuse.whole_batch import output_batches
from shardwright.core.parallel.module_tensors import ModuleTensors
from shardwright.core.parallel.output_tensor import as_output_tensor
from shardwright.core.parallel.train_step import TrainStep
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import as_dtensor


@dataclass(frozen=True)
class BoundProgram:
    """A program with the module tensors that it reads and updates.

    Args:
        recomputes: whether the backward pass recomputes operators.
        draws_random_numbers: whether an operator draws random numbers, as dropout does.
        devices: this rank's view of the program's device matrix, whose axes may differ from the
            plan's.
        off_path: watches outputs whose gradients would be incomplete, as the backward pass from
            other outputs does not reach them.
    """

    graph: Graph
    program: Program
    tensors: ModuleTensors
    recomputes: bool
    draws_random_numbers: bool
    devices: Devices
    off_path: OutputsOffPath

    @property
    def python(self) -> PythonCall | None:
        """The captured Python code that runs around the graph; None if only the graph runs."""
        return self.graph.python

    def wrap_outputs(
        self,
        outputs: Sequence[Any],
        sizes: BatchSizes | None,
        model: str,
        watch: Callable[[Tensor, str], None],
    ) -> list[Any]:
        """Wrap sharded and partial outputs as `OutputTensor`; mark outputs of the global batch.

        Args:
            outputs: local results of the program.
            sizes: local and global batch size if this rank passed a local batch, else None.
            model: name of the model for errors.
            watch: registers the check of an output's gradients.
        """
        flow, spec = self.program.communication, self.graph.out_spec
        batches = output_batches(model, spec, sizes, watch)
        # Outputs after the first `num_leaves` are stored in Python objects and are not returned.
        batches += [None] * (len(outputs) - spec.num_leaves)
        result = []
        for value, tensor, batch in zip(self.graph.outputs, outputs, batches, strict=True):
            if isinstance(value, Value):
                layout = flow.returned(value)
                if layout.sharded or layout.partial:
                    like = torch.empty(value.shape, device="meta")
                    tensor = as_output_tensor(as_dtensor(tensor, like, layout, self.devices), batch)
                elif batch is not None:
                    tensor = batch.label(tensor)
            result.append(tensor)
        return result


@dataclass(frozen=True)
class BoundStep:
    """A training step with the module tensors that it reads and updates."""

    step: TrainStep
    tensors: ModuleTensors

    @property
    def python(self) -> PythonCall | None:
        """The captured Python code that runs around the graph; None if only the graph runs."""
        return self.step.partitioned.graph.python

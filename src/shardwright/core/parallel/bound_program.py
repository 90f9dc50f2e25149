"""Programs and training steps with the module tensors that they read and update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.graph.python_call import PythonCall
from shardwright.core.lower.program import Program
from shardwright.core.misuse.between_outputs import OutputsOffPath
from shardwright.core.misuse.gradient_guard import WatchGradient
from shardwright.core.misuse.output_names import output_names
from shardwright.core.parallel.module_tensors import ModuleTensors
from shardwright.core.parallel.output_tensor import as_output_tensor
from shardwright.core.parallel.train_step import TrainStep
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import as_dtensor
from shardwright.core.runtime.local_gradients import average_gradients, scale_gradient


@dataclass(frozen=True)
class BoundProgram:
    """A program with the module tensors that it reads and updates.

    Args:
        recomputes: whether the backward pass recomputes operators.
        draws_random_numbers: whether an operator draws random numbers, as dropout does.
        devices: this rank's view of the program's device matrix, whose axes may differ from the
            plan's.
        off_path: rejects a gradient with respect to an output that would miss terms of other
            outputs, such as `torch.autograd.grad(loss, hidden)`.
        local_outputs: number of local batches, by output name, for outputs with the samples of this
            rank's local batch only.
        outputs_without_samples: names of outputs that depend on no sample, if ranks pass local
            batches.
    """

    graph: Graph
    program: Program
    tensors: ModuleTensors
    recomputes: bool
    draws_random_numbers: bool
    devices: Devices
    off_path: OutputsOffPath
    local_outputs: Mapping[str, int] = field(default_factory=dict)
    outputs_without_samples: frozenset[str] = frozenset()

    @property
    def python(self) -> PythonCall | None:
        """The Python code captured around the graph by TorchDynamo; None if a call runs the graph
        only."""
        return self.graph.python

    @cached_property
    def _output_names(self) -> list[str]:
        return output_names(self.graph)

    def wrap_outputs(
        self, outputs: Sequence[Any], model: str, watch: WatchGradient | None
    ) -> list[Any]:
        """Wrap sharded and partial outputs as `OutputTensor`, except local outputs.

        Args:
            outputs: local results of the program.
            model: name of the model for errors.
            watch: function that registers a check that all ranks pass equal gradients for a global
                output; None on a single rank.
        """
        flow = self.program.communication
        result = list[Any]()
        # Indices in `result` of outputs with a gradient.
        local, without_samples = list[int](), list[int]()
        for value, tensor, name in zip(
            self.graph.outputs, outputs, self._output_names, strict=True
        ):
            if isinstance(value, Value) and value.name in self.local_outputs:
                # The ranks' own losses are averaged, as under `DistributedDataParallel`.
                tensor = scale_gradient(tensor, 1 / self.local_outputs[value.name])
                if tensor.requires_grad:
                    local.append(len(result))
            elif isinstance(value, Value):
                layout = flow.returned_layout(value)
                # All ranks watch the same outputs, as each comparison is a collective.
                watch_output = (
                    partial(watch, name=f"{name} of {model}") if watch is not None else None
                )
                if layout.sharded or layout.partial:
                    # `as_dtensor` reads only the global shape of this tensor.
                    like = torch.empty(value.shape, device="meta")
                    tensor = as_dtensor(tensor, like, layout, self.devices)
                    tensor = as_output_tensor(tensor, watch_output)
                elif value.name in self.outputs_without_samples and watch_output is not None:
                    if tensor.requires_grad:
                        without_samples.append(len(result))
                # A replicated output is an ordinary tensor, whose gradient is watched from the
                # start; that of a sharded one only once the output is gathered
                # (`OutputTensor.full_tensor`).
                elif watch_output is not None:
                    watch_output(tensor)
            result.append(tensor)
        if without_samples and torch.is_grad_enabled():
            averaged = average_gradients(
                [result[index] for index in local], [result[index] for index in without_samples]
            )
            for index, tensor in zip([*without_samples, *local], averaged, strict=True):
                result[index] = tensor
        return result


@dataclass(frozen=True)
class BoundStep:
    """A training step with the module tensors that it reads and updates."""

    step: TrainStep
    tensors: ModuleTensors

    @property
    def python(self) -> PythonCall | None:
        """The Python code captured around the graph by TorchDynamo; None if a call runs the graph
        only."""
        return self.step.partitioned.graph.python

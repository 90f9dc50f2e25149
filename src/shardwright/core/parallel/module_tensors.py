"""The parameters and buffers of a module that a program reads and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.core.graph.graph import Value
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.torch_internals.tensors import copy_all_

TensorOwner = tuple[str, nn.Module, str]
"""(Full name of a buffer, module that owns it, name of the buffer in that module)."""


@dataclass(frozen=True)
class ModuleTensors:
    """Parameters and buffers that a graph reads.

    Parameters are looked up once, buffers on each call, because `forward` may replace them.

    Args:
        parameters: parameters by full name.
        buffers: owner of each buffer.
    """

    parameters: Mapping[str, Tensor]
    buffers: tuple[TensorOwner, ...]

    @classmethod
    def of(
        cls, module: nn.Module, parameters: Sequence[Value], buffers: Sequence[Value]
    ) -> ModuleTensors:
        """Look up `parameters`, and the owners of `buffers`, in `module`."""

        def owner(value: Value) -> TensorOwner:
            path, _, name = value.name.rpartition(".")
            return value.name, module.get_submodule(path), name

        tensors = {name: getattr(parent, leaf) for name, parent, leaf in map(owner, parameters)}
        return cls(tensors, tuple(map(owner, buffers)))

    def read(self) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
        """Return (parameters, local tensors of the buffers), both by name."""
        # Local shards, as frozen parameters that `forward` updates are buffers of the graph, but
        # DTensors.
        return self.parameters, {n: detached_local(getattr(m, leaf)) for n, m, leaf in self.buffers}

    def write(self, changed: Mapping[str, Tensor]) -> None:
        """Copy the tensors in `changed` into the buffers and parameters of the same names."""
        if changed:
            _, buffers = self.read()
            with torch.no_grad():
                # Frozen parameters that `forward` updates in place are among the graph's buffers;
                # a trained one is listed as a parameter.
                tensors = [
                    buffers[name] if name in buffers else detached_local(self.parameters[name])
                    for name in changed
                ]
                # In place, so that other references to the buffers see the new values.
                copy_all_(tensors, list(changed.values()))

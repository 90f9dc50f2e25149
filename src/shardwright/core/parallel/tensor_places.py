"""Find the parameters and buffers of a module that a program reads and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.core.graph.graph import Value
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.torch_internals.tensors import copy_all_

TensorOwner = tuple[str, nn.Module, str]
"""Full name of a buffer, the module that owns it, and its name in that module."""


@dataclass(frozen=True)
class TensorPlaces:
    """The parameters that a graph reads, and the owners of its buffers.

    Buffers are looked up in each call, as `forward` may replace them; parameters are not.
    """

    parameters: Mapping[str, Tensor]
    buffers: tuple[TensorOwner, ...]

    @classmethod
    def of(
        cls, module: nn.Module, parameters: Sequence[Value], buffers: Sequence[Value]
    ) -> TensorPlaces:
        """Look parameters and buffers up by their names."""

        def owner(value: Value) -> TensorOwner:
            path, _, name = value.name.rpartition(".")
            return value.name, module.get_submodule(path), name

        held = {name: getattr(bearer, leaf) for name, bearer, leaf in map(owner, parameters)}
        return cls(held, tuple(map(owner, buffers)))

    def read(self) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
        """Parameters, and local tensors of buffers and of parameters updated like buffers."""
        return self.parameters, {n: detached_local(getattr(m, leaf)) for n, m, leaf in self.buffers}

    def write(self, changed: Mapping[str, Tensor]) -> None:
        """Copy new values into buffers and parameters, by name."""
        if changed:
            _, buffers = self.read()
            with torch.no_grad():
                tensors = [
                    buffers[name] if name in buffers else detached_local(self.parameters[name])
                    for name in changed
                ]
                copy_all_(tensors, list(changed.values()))

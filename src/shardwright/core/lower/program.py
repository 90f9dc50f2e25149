"""Lower a chunk to the program of one rank.

The program is generated Python source that computes on local tensors: the operators of the graph in
order, with a redistribution wherever an operator reads a value in another layout than the layout in
which its producer computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Value
from shardwright.core.lower.regions import Compiler
from shardwright.core.partition.communication import Communication
from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.runtime.regather import BackwardRegather

aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Args:
        source: Python source of the program.
        function: function compiled from `source`.
        communication: redistributions and buckets of the program.
        parameters: parameters that the graph reads.
        buckets: buckets of `communication`, bound to this rank's process groups.
        unsharded: whether the program reads parameters from `UnshardedParameters` instead of
            gathering them.
        casts: parameters without a bucket that an unsharded program reads in another dtype than
            stored.
        regather: all-gathers buckets again in the backward pass; None if no bucket is regathered.
        by_region: returns the function with its repeated blocks compiled once as one function; None
            without repeated blocks.
    """

    source: str
    function: Callable[..., tuple[list[Any], list[Tensor]]]
    communication: Communication
    parameters: tuple[Value, ...]
    buckets: tuple[BoundBucket, ...]
    unsharded: bool = False
    casts: tuple[Value, ...] = ()
    regather: BackwardRegather | None = None
    by_region: Callable[[Compiler], Callable[..., Any] | None] = lambda compiler: None

    def compiled(self, compiler: Compiler, regional: bool) -> Program:
        """Return the program compiled by `compiler`.

        If `regional`, only its repeated blocks are compiled, as one function.
        """
        function = self.by_region(compiler) if regional else None
        # Without repeated blocks there is no region, and the whole program is compiled.
        return replace(self, function=function or compiler(self.function))

    def __call__(
        self,
        parameters: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Any],
        seed: int = 0,
    ) -> tuple[list[Any], list[Tensor]]:
        """Run the program on local tensors.

        Args:
            parameters: this rank's shards in the plan's storage layout; for an `unsharded` program,
                the cached unsharded parameters of the step.
            buffers: unsharded buffers by name, and the values of the constants in the argument
                `python_state` of `lower`.
            inputs: leaves of the call's arguments, with full tensors or, for inputs that arrive
                sharded, this rank's shards.
            seed: seed of random operators, equal on all ranks and different in each step.

        Returns:
            The leaves of the model's outputs, and the new values of the graph's `updates`, in the
            layouts of the old values.
        """
        # Without gradients autograd saves nothing, and each bucket is freed after its last use.
        if self.regather is None or not torch.is_grad_enabled():
            return self.function(parameters, buffers, inputs, seed)
        with self.regather.run():
            return self.function(parameters, buffers, inputs, seed)

    def __str__(self) -> str:
        return self.source

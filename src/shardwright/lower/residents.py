"""Parameters in the layout of their use, kept through the micro-batches of one step.

    residents = Residents(lower(graph, devices, decided, resident=True))
    residents.begin(shards)
    for piece in pieces:                       # also several in flight, as in a pipeline
        outputs, updates = program(residents.tensors(), buffers, piece, seed)
        ...backward...
    gradients = residents.end()
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardwright.lower.program import Program


class Residents:
    """What a program that was lowered with `resident=True` reads as its `parameters`.

    All tensors are local. How it works depends on the plan's level:

    - off, `level1`: gathered (and cast) once a step; `tensors()` gives the same leaves for each
      micro-batch, whose gradients add up whole; `end()` reduces them, once a step.
    - `level2`: gathered once; `tensors()` gives for each micro-batch the results of an autograd
      function over them, whose backward reduces a bucket as soon as it is complete.
    - `level3`: the program gathers by itself; `tensors()` gives the stored shards as leaves.
    """

    def __init__(self, program: Program) -> None:
        raise NotImplementedError

    def begin(self, shards: Mapping[str, Tensor]) -> None:
        """Begins a step: starts the gathers; their results are waited for in `tensors`.

        Args:
            shards: by name this rank's part of each parameter as it is stored; what does not
                require a gradient is given as such.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The program's `parameters` for one micro-batch; called once before each forward."""
        raise NotImplementedError

    def end(self) -> dict[str, Tensor]:
        """Ends the step, after the last backward: reduces what is left to reduce, frees what was
        gathered, and returns the gradients of the stored shards, in their dtype, by name; of those
        that have one."""
        raise NotImplementedError

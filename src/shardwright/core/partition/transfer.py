"""One redistribution step on the way of a value from where it is made to where it is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.core.graph.graph import Value
from shardwright.core.layout.redistribution import RedistributionStep


@dataclass(eq=False)
class Transfer:
    """One redistribution step of a value, made once for all its consumers.

    Args:
        before: the transfer whose result this one converts; None if it starts at the value itself.
        trained: whether a gradient of the graph's `trained` outputs comes back through it.
        segment: with which operators it is made again in the backward pass, if it is.
        again: whether that backward pass is one of the `trained` outputs.
    """

    value: Value
    step: RedistributionStep
    before: Transfer | None
    trained: bool
    segment: str | None = None
    again: bool = False

    @cached_property
    def forward_bytes(self) -> int:
        """Bytes that one device sends in the forward pass."""
        return self.step.forward_bytes(self.value.shape, self.value.itemsize)

    @property
    def backward_bytes(self) -> int:
        """Bytes that one device sends for the gradient, and to make it again."""
        again = self.forward_bytes if self.again else 0
        if not self.trained:
            return again
        return again + self.step.backward_bytes(self.value.shape, self.value.itemsize)

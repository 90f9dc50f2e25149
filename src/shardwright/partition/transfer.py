"""One redistribution step on the way of a value from where it is made to where it is read."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.graph.graph import Value
from shardwright.layout.redistribution import RedistributionStep


@dataclass(eq=False)
class Transfer:
    """One redistribution step of a value, made once for all its consumers.

    Args:
        before: the transfer whose result this one converts; None if it starts at the value itself.
        differentiable: whether a gradient comes back through it from any consumer.
        segment: with which operators it is made again in the backward pass, if it is.
    """

    value: Value
    step: RedistributionStep
    before: Transfer | None
    differentiable: bool
    segment: str | None = None

    @property
    def forward_bytes(self) -> int:
        """Bytes that one device sends in the forward pass."""
        return self.step.forward_bytes(self.value.shape, self.value.itemsize)

    @property
    def backward_bytes(self) -> int:
        """Bytes that one device sends for the gradient, and to make it again."""
        again = 0 if self.segment is None else self.forward_bytes
        if not self.differentiable:
            return again
        return again + self.step.backward_bytes(self.value.shape, self.value.itemsize)

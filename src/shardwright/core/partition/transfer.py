"""A transfer: one redistribution step of a value between its producer and its consumers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.core.graph.graph import Value
from shardwright.core.layout.redistribution_step import RedistributionStep


@dataclass(eq=False)
class Transfer:
    """One redistribution step of a value, which consumers of the value may share.

    Transfers are compared by identity: equal steps after different steps are different transfers.

    Args:
        previous: transfer whose result the step redistributes; None if the step redistributes the
            output of the producer.
        trained: whether the backward pass from `Graph.trained` redistributes a gradient in the
            opposite direction.
        segment: name of the recomputed segment that repeats the transfer in the backward pass; None
            if no segment does.
        is_repeated: whether the backward pass from `Graph.trained` repeats the transfer.
    """

    value: Value
    step: RedistributionStep
    previous: Transfer | None
    trained: bool
    segment: str | None = None
    is_repeated: bool = False

    @cached_property
    def forward_bytes(self) -> int:
        """Bytes that one device sends for the transfer in the forward pass."""
        # Cached, so not to be read before `join_transfers`, which replaces `step`.
        return self.step.forward_bytes(self.value.shape, self.value.itemsize)

    @property
    def backward_bytes(self) -> int:
        """Bytes that one device sends for the transfer in the backward pass, to redistribute the
        gradient and to repeat the forward step in a recomputed segment."""
        repeated_bytes = self.forward_bytes if self.is_repeated else 0
        # A segment also repeats transfers without a gradient, such as those of a mask.
        if not self.trained:
            return repeated_bytes
        return repeated_bytes + self.step.backward_bytes(self.value.shape, self.value.itemsize)

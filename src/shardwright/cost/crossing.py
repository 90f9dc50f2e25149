"""What pipelining holds of the values that cross between parts, beyond what autograd keeps.

Facts of `torch.distributed.pipelining`: a stage receives into buffers of its own, one for each
micro-batch. What it sends is held until the schedule lets go of the message: `1f1b` with the next
one, the others at the end of the step. Between two parts of one stage nothing is sent: the one's
result takes the place of the other's buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.layout import Layout
from shardwright.parts import Part
from shardwright.pipelining import Pipelining


@dataclass(frozen=True)
class Crossing:
    """Bytes of one part, for each micro-batch.

    Args:
        shared: of what it leaves, what lies in the next part's buffers from its forward pass on.
        sent: what stays when its backward pass has freed the rest.
        returned: gradients of what it received, which stay from its backward pass on.
        once: whether that is so of one micro-batch only.
    """

    shared: int = 0
    sent: int = 0
    returned: int = 0
    once: bool = False


def crossing(part: Part, mesh: Layout, pipeline: Pipelining) -> Crossing:
    """What is held of the values that cross the borders of `part`."""
    sent, returned = part.sent_bytes(mesh)

    def beside(number: int) -> bool:
        return 0 <= number < pipeline.parts and pipeline.stage_of(number) == part.stage

    if beside(part.number - 1):
        # The gradients of its buffers are the buffers for the gradients of the part before.
        returned = 0
    if beside(part.number + 1):
        return Crossing(shared=sent, returned=returned)
    # 1F1B holds one message forward, from before its first backward pass, and the last one back.
    return Crossing(sent=sent, returned=returned, once=pipeline.schedule == "1f1b")

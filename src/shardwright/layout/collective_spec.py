"""The kinds of redistribution steps, one entry each: what they send, and how often. No torch.

To add a kind, add its `CollectiveSpec` here, and what carries it out to the table `BINDINGS` of
`runtime/collectives.py`.

Bytes are those that one device sends, by the ring algorithms of the literature (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): with p devices in the
group an all-gather sends (p-1)/p of its output, a reduce-scatter (p-1)/p of its input, an
all-reduce both, an all-to-all (p-1)/p of the local tensor, a permute all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwright.layout.axes import Axes
from shardwright.layout.layout import TensorLayout

Pattern = Literal["ring", "pairwise", "point_to_point"]
"""How messages travel: round the group, level by level of the links; from each device to each
other one; from each device to those that its block has parts for."""

AxesBetween = Callable[[TensorLayout, TensorLayout], Axes | None]


@dataclass(frozen=True)
class CollectiveSpec:
    """One kind of step between two layouts.

    Args:
        kind: its name.
        local: whether nothing is sent forward.
        backward: the kind whose collective the gradient is; None if the gradient sends nothing.
        backward_if_varying: likewise, where the step leaves the tensor varying.
        pattern: how its messages travel.
        passes: how often (p-1)/p of the tensor's larger side is sent; of a point-to-point pattern,
            how often all of it.
        rounds: how often everything goes through the group.
        gloo_rounds: likewise with gloo, where that differs.
        joins: the kind of which it replaces two steps in a row, at no more bytes.
        axes_between: of a kind that joins, the axes over which it leads from one layout to another
            at once; None if it does not.
    """

    kind: str
    local: bool = False
    backward: str | None = None
    backward_if_varying: str | None = None
    pattern: Pattern = "ring"
    passes: int = 1
    rounds: int = 1
    gloo_rounds: int | None = None
    joins: str | None = None
    axes_between: AxesBetween | None = None

    def backward_of(self, varying: bool) -> str | None:
        """The collective of the gradient; None if that sends nothing."""
        return self.backward_if_varying if varying else self.backward

    def sent(self, size: int, group: int) -> int:
        """What one device of a group sends, rounded up, if its tensor's larger side is `size`."""
        if self.pattern == "point_to_point":
            return self.passes * size
        return -(-self.passes * (group - 1) * size // group)


# In the order in which steps of equal cost are taken.
COLLECTIVES = {
    spec.kind: spec
    for spec in (
        CollectiveSpec("slice", local=True, backward="all_gather"),
        CollectiveSpec("reduce_scatter", backward="all_gather", gloo_rounds=2),
        CollectiveSpec("permute", backward="permute", pattern="point_to_point"),
        CollectiveSpec("all_to_all", backward="all_to_all", pattern="pairwise"),
        CollectiveSpec("all_reduce", passes=2, rounds=2),
        CollectiveSpec("vary", local=True, backward_if_varying="all_reduce"),
        CollectiveSpec("all_gather", backward_if_varying="reduce_scatter"),
    )
}

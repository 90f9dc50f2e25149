"""How a value of a graph depends on the samples of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.core.graph.graph import Op, Value, target_name
from shardwright.core.graph.loss_weighting import SampleReduction

AVERAGE: Literal["mean"] = "mean"
SUM: Literal["sum"] = "sum"
TOTALS: Literal["totals"] = "totals"
ROWS: Literal["rows"] = "rows"


@dataclass(frozen=True)
class Mixed:
    """State of a value that combines samples other than by mean or sum.

    Args:
        op: first operator that combines samples.
        why: verb phrase that follows the operator's name in errors.
    """

    op: Op
    why: str

    def __str__(self) -> str:
        where = f" ({self.op.source})" if self.op.source else ""
        return f"{target_name(self.op.target)} in {self.op.name!r}{where} {self.why}"


@dataclass(frozen=True)
class Quotient:
    """State of a mean or sum over samples divided by what follows from the inputs alone.

    Args:
        reduction: of the dividend.
        divisor: the value; of a mean over targets, the targets.
        class_weights: of a mean over targets.
        counted: name of the operator that is a mean over targets.
        ignored: the target that it ignores.
        weights_add_up: whether the weights of all micro-batches add up to 1.
    """

    reduction: SampleReduction
    divisor: Value
    class_weights: Value | None = None
    counted: str = field(default="", compare=False)
    ignored: int | None = None
    weights_add_up: bool = True


SampleState = int | Literal["mean", "sum", "totals", "rows"] | Quotient | Mixed
"""How a value depends on samples: the sample dimension, `AVERAGE` or `SUM` over samples, `TOTALS`
(a function of means and sums that follow from the inputs alone), a `Quotient`, `ROWS` (positions of
all samples in the batch, as `arange(len(x))`), or `Mixed`. Values that depend on no sample have no
state."""


def sample_dim_of_index(op: Op, states: Mapping[Value, SampleState]) -> int | None:
    """The sample dimension of the output of `x[..., rows, i, j]`, where `rows` has state `ROWS` and
    indexes the sample dimension of `x`; None for any other indexing."""
    x, indices = op.args[0], op.args[1]
    sample_dim = states.get(x)
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dims = [dim for dim, _ in indexed]
    # Where indices are not adjacent, PyTorch moves the indexed dimensions to the front.
    adjacent = dims == [*range(dims[0], dims[0] + len(dims))]
    rows = [index for dim, index in indexed if dim == sample_dim]
    if not adjacent or not rows or states.get(rows[0]) != ROWS:
        return None
    # As many dimensions as the broadcast indices have replace the indexed ones.
    rank = max(len(index.shape) for _, index in indexed)
    # Indices broadcast together, so dimensions are counted from the end: `rows` may be (n, 1).
    from_end = next((d for d, size in enumerate(rows[0].shape) if size > 1), 0) - len(rows[0].shape)

    def follows(index: Value) -> bool:
        """Whether an index is constant over samples or has them in the same dimension as `rows`."""
        state, shape = states.get(index), index.shape
        if state is None:
            return len(shape) < -from_end or shape[from_end] == 1
        return state == from_end + len(shape)

    if not all(follows(index) for dim, index in indexed if dim != sample_dim):
        return None
    return dims[0] + rank + from_end

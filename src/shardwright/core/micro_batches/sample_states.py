"""`SampleState`: how a value of a graph depends on the samples of the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from shardwright.core.graph.graph import Op, Value, target_name

AVERAGE: Literal["mean"] = "mean"
SUM: Literal["sum"] = "sum"
WHOLE: Literal["whole"] = "whole"
POSITIONS: Literal["positions"] = "positions"
UNKNOWN: Literal["unknown"] = "unknown"

SampleState = int | Literal["mean", "sum", "whole", "positions", "unknown"]
"""How a value depends on the samples of the batch:

- an int: the value is split into micro-batches along this dimension;
- `AVERAGE`, `SUM`: the value for the global batch is the mean or sum of the micro-batches' values;
- `WHOLE`: the value is equal in all micro-batches;
- `POSITIONS`: the value contains the indices of all samples, as `arange(len(x))`;
- `UNKNOWN`: none of these cases applies; the loss must not depend on the value.
"""


class UnsplittableError(Exception):
    """Raised for an operator that cannot run on micro-batches, so that the batch cannot be split.

    Args:
        op: the operator that cannot run on micro-batches.
        why: reason for the error as a clause, such as "the operator mixes samples".
    """

    def __init__(self, op: Op, why: str) -> None:
        super().__init__(op, why)
        self.op, self.why = op, why

    def __str__(self) -> str:
        where = f" ({self.op.source})" if self.op.source else ""
        name = re.sub(r".*\.graph\.(custom_ops|local_map)\.", "", target_name(self.op.target))
        return f"{name} in {self.op.name!r}{where}: {self.why}"


def sample_dim_of_index(op: Op, states: Mapping[Value, SampleState]) -> int | None:
    """Return the batch dimension of the output of `x[..., arange(batch_size), i, j]`.

    Returns None for any other indexing. The state of `arange(batch_size)` is `POSITIONS`.

    Args:
        op: an `aten.index` operator.
        states: the state of each value.
    """
    x, indices = op.args[0], op.args[1]
    sample_dim = states.get(x)
    # `None` stands for `:` in front of an index.
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dims = [dim for dim, _ in indexed]
    rows = [index for dim, index in indexed if dim == sample_dim]
    if not rows or states.get(rows[0]) != POSITIONS:
        return None
    # The dimensions of the broadcast indices replace the indexed dimensions.
    rank = max(len(index.shape) for _, index in indexed)
    # Indices broadcast together, so dimensions are counted from the end: `rows` may be (n, 1).
    from_end = next((d for d, size in enumerate(rows[0].shape) if size > 1), 0) - len(rows[0].shape)

    def follows(index: Value) -> bool:
        """Whether `index` is equal for all samples, or has its batch dimension where `rows` has
        it."""
        state, shape = states.get(index), index.shape
        if state == WHOLE:
            return len(shape) < -from_end or shape[from_end] == 1
        return state == from_end + len(shape)

    if not all(follows(index) for dim, index in indexed if dim != sample_dim):
        return None
    # Where indices are not adjacent, PyTorch moves the indexed dimensions to the front.
    adjacent = dims == [*range(dims[0], dims[0] + len(dims))]
    return (dims[0] if adjacent else 0) + rank + from_end

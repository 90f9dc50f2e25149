"""The user's sharding strategies, resolved to cuts on a device matrix.

A strategy has one entry per tensor: the number of equal shards of each dimension, `(2, 4)`; a
`TensorLayout`, which names the axes that cut each dimension, in order; or `None`, which leaves the
tensor to the other entries.
"""

from shardwright.core.constraints.inputs import (
    DatasetStrategy,
    arrivals,
    check_dataset_strategy,
    input_entries,
)
from shardwright.core.constraints.resolve import ResolvedConstraints, requested_storage, resolve
from shardwright.core.constraints.strategy import (
    Entry,
    OperatorStrategy,
    check_entries,
    check_entry,
    entry_text,
)

__all__ = [
    "DatasetStrategy",
    "Entry",
    "OperatorStrategy",
    "ResolvedConstraints",
    "arrivals",
    "check_dataset_strategy",
    "check_entries",
    "check_entry",
    "entry_text",
    "input_entries",
    "requested_storage",
    "resolve",
]

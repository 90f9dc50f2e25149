"""Resolve the user's sharding constraints to sharded factors on a device matrix.

A strategy has one entry per tensor: the number of equal shards of each dimension, `(2, 4)`; a
`TensorLayout`, which names the mesh axes that shard each dimension, in order; or `None`, if the
sharding of the tensor follows from the entries of the other tensors.
"""

from shardwright.core.constraints.inputs import (
    DatasetStrategy,
    input_entries,
    requested_dataset_strategy,
    sharded_input_axes,
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
    "check_entries",
    "check_entry",
    "entry_text",
    "input_entries",
    "requested_dataset_strategy",
    "requested_storage",
    "resolve",
    "sharded_input_axes",
]

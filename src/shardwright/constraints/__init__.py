"""What users say of an operator, read as cuts on a device matrix.

A strategy says of each tensor in how many equal parts each dimension is cut, `(2, 4)`; or exactly,
with a `TensorLayout`, which axes cut it in which order; or nothing, `None`.
"""

from shardwright.constraints.inputs import (
    DatasetStrategy,
    arrivals,
    check_dataset_strategy,
    input_entries,
)
from shardwright.constraints.resolve import ResolvedConstraints, requested_storage, resolve
from shardwright.constraints.strategy import (
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

"""What users say of an operator, read as cuts on a device matrix.

A strategy says of each tensor in how many equal parts each dimension is cut, `(2, 4)`; or exactly,
with a `TensorLayout`, which axes cut it in which order; or nothing, `None`.
"""

from shardwright.strategy.entry import (
    Entry,
    OperatorStrategy,
    check_entries,
    check_entry,
    entry_text,
)
from shardwright.strategy.fixed import Fixed, fix, storage_as_said
from shardwright.strategy.inputs import (
    DatasetStrategy,
    arrivals,
    check_dataset_strategy,
    input_entries,
)

__all__ = [
    "DatasetStrategy",
    "Entry",
    "Fixed",
    "OperatorStrategy",
    "arrivals",
    "check_dataset_strategy",
    "check_entries",
    "check_entry",
    "entry_text",
    "fix",
    "input_entries",
    "storage_as_said",
]

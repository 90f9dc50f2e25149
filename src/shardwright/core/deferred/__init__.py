"""Models built without memory for their parameters, which are initialized later, bit for bit."""

from shardwright.core.deferred.across_ranks import init_record_lines, share_starts
from shardwright.core.deferred.module import (
    copies_of_attributes,
    deferred_attributes,
    materialize,
    materialize_attributes,
)
from shardwright.core.deferred.tensor import Deferred, no_init_parameters, value_of, values_of

__all__ = [
    "Deferred",
    "copies_of_attributes",
    "deferred_attributes",
    "init_record_lines",
    "materialize",
    "materialize_attributes",
    "no_init_parameters",
    "share_starts",
    "value_of",
    "values_of",
]

"""Deferred initialization: models are built without memory for their parameters, which are
initialized later to bitwise the same values as in ordinary construction."""

from shardwright.core.deferred.across_ranks import init_record_lines, share_generator_states
from shardwright.core.deferred.init_record import Record
from shardwright.core.deferred.module import (
    copies_of_attributes,
    deferred_attributes,
    materialize,
    materialize_attributes,
)
from shardwright.core.deferred.tensor import (
    Deferred,
    deferred_like,
    is_initialized,
    no_init_parameters,
    recording,
    value_of,
    values_of,
)

__all__ = [
    "Deferred",
    "Record",
    "copies_of_attributes",
    "deferred_attributes",
    "deferred_like",
    "init_record_lines",
    "is_initialized",
    "materialize",
    "materialize_attributes",
    "no_init_parameters",
    "recording",
    "share_generator_states",
    "value_of",
    "values_of",
]

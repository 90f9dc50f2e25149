"""Detect ranks that pass the global batch although the plan expects a local batch on each.

The gradients are then those of the batch that all pass, but each rank computes all of it, and a
step has no more samples than on one device. Equal local batches alone are no error: they may be
constant, as in a test that overfits one batch. They are an error if they have the size of the
planned global batch, or change from step to step, as then a loader was not divided.
"""

from __future__ import annotations

import logging

from shardwright.errors import DataError

log = logging.getLogger("shardwright")

SHARD_OF_BATCH = (
    "load batches with `sw.dataloader`, or select samples with `shardwright.run.BatchSampler` or"
    " `shardwright.run.local_batch`: they give each rank its shard by the plan's `dataset_strategy`"
)


class EqualShards:
    """Checks of calls in which all ranks pass equal values as their shards of the batch."""

    def __init__(self) -> None:
        self._has_warned = False
        self._trained_hashes: tuple[int, ...] | None = None

    def check(
        self, call: int, names: str, hashes: tuple[int, ...], *, trains: bool, is_global: bool
    ) -> None:
        """Check a call in which all ranks passed equal values.

        Args:
            call: the number of the call, from 1.
            names: names of the inputs, for errors.
            hashes: hashes of the full contents of the inputs.
            trains: whether the call is one with gradients; others may evaluate on all ranks.
            is_global: whether the inputs have the size of the planned global batch.

        Raises:
            DataError: if the ranks pass a global batch.
        """
        if trains and is_global:
            raise DataError(
                f"call {call}: all ranks passed an equal batch of the planned global size for"
                f" input {names}, but the plan's `dataset_strategy` expects its own shard of the"
                f" batch on each rank\n{SHARD_OF_BATCH}; to pass the global batch on every rank,"
                " plan with `dataset_strategy='full_batch'`"
            )
        earlier = self._trained_hashes
        if trains and earlier is not None and earlier != hashes:
            raise DataError(
                f"call {call}: all ranks passed equal values for input {names}, as in an earlier"
                " call with other values, but the plan's `dataset_strategy` expects its own shard"
                f" of the batch on each rank\n{SHARD_OF_BATCH}; to pass equal batches on all ranks,"
                " plan with `dataset_strategy='full_batch'`"
            )
        self._trained_hashes = hashes if trains else earlier
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "call %d: all ranks passed equal values for input %s, but each should pass its own"
                " shard of the batch\n%s",
                call,
                names,
                SHARD_OF_BATCH,
            )

"""Ranks that pass local batches get the outputs of their own samples, and train as under DDP."""

from __future__ import annotations

from core.partition.local_outputs_ranks import CHECKS, CHECKS_ON_FOUR_RANKS
from torchrun import checks_on_ranks

test_local_batches_on_two_ranks = checks_on_ranks(CHECKS, 2)
test_local_batches_on_four_ranks = checks_on_ranks(CHECKS_ON_FOUR_RANKS, 4)

"""Optimizer parallel and micro-batches in real processes."""

import pytest

from features.optimizer_parallel_ranks import CHECKS, SLOW_CHECKS
from torchrun import checks_on_ranks

test_real_processes_train_as_one_device_does = checks_on_ranks(CHECKS, 4)
test_every_level_trains_as_one_device_does = pytest.mark.slow(
    checks_on_ranks(SLOW_CHECKS, 4, "slow")
)

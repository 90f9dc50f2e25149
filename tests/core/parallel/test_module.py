"""`parallelize` in real processes."""

import pytest

from core.parallel.module_ranks import CHECKS, SLOW_CHECKS
from torchrun import checks_on_ranks

test_real_processes_train_as_one_device_does = checks_on_ranks(CHECKS, 4)
test_any_plan_trains_as_one_device_does = pytest.mark.slow(checks_on_ranks(SLOW_CHECKS, 4, "slow"))

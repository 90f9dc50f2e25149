"""Pipeline stages in real processes: many checks in one launch of four ranks, or of eight."""

import pytest

from core.parallel.pipeline_ranks import CHECKS, SLOW_CHECKS
from torchrun import checks_on_ranks

test_real_stages_train_as_one_device_does = checks_on_ranks(CHECKS, 4)
test_every_kind_of_stage_trains_as_one_device_does = pytest.mark.slow(
    checks_on_ranks(SLOW_CHECKS, 8, "slow")
)

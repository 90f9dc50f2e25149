"""Pipeline stages of models that are built on the meta device and initialized afterwards."""

from core.parallel.uninitialized_stage_ranks import CHECKS
from torchrun import checks_on_ranks

test_stages_of_one_device = checks_on_ranks(CHECKS, 2)
test_stages_of_two_devices = checks_on_ranks(CHECKS, 4)

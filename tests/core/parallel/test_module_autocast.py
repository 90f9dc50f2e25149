"""Autocast around and inside of planned models."""

from core.parallel.autocast_ranks import CHECKS
from torchrun import checks_on_ranks

test_autocast_is_that_of_one_device = checks_on_ranks(CHECKS, 4)

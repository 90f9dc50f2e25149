"""Operators on full tensors write what one device would into DTensors of all placements."""

from core.runtime.full_tensors_ranks import CHECKS
from torchrun import checks_on_ranks

test_full_tensors_on_four_ranks = checks_on_ranks(CHECKS, 4)

"""`parallelize` in place, and with `copy=True`, on real processes."""

from core.parallel.stored_tensors_ranks import CHECKS
from torchrun import checks_on_ranks

test_in_place_on_two_ranks = checks_on_ranks(CHECKS, 2)
test_in_place_on_four_ranks = checks_on_ranks(CHECKS, 4)

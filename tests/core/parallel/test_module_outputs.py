"""Models with several outputs in real processes."""

from core.parallel.output_ranks import CHECKS
from torchrun import checks_on_ranks

test_any_outputs_train_as_on_one_device = checks_on_ranks(CHECKS, 4)

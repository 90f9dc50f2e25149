"""`torch.nn.utils` computes norms over pipeline stages and several models as on one device."""

from __future__ import annotations

from core.runtime.total_norms_ranks import CHECKS
from torchrun import checks_on_ranks

test_on_four_ranks = checks_on_ranks(CHECKS, 4)

"""One plan for all ranks."""

from core.api.shared_plan_ranks import CHECKS
from torchrun import checks_on_ranks

test_rank_0_plans_for_all = checks_on_ranks(CHECKS, 3)

"""Parts of models that run as they are, on real and on simulated ranks."""

from __future__ import annotations

import pytest

from features import local_map_ranks
from torchrun import checks_on_ranks

test_two_ranks = checks_on_ranks(local_map_ranks.CHECKS, 2)
test_four_ranks = pytest.mark.slow(checks_on_ranks(local_map_ranks.CHECKS, 4))

"""Lightning loops that change parameters or random numbers train as on one process."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from integrations.lightning_loops_ranks import CHECKS
from torchrun import checks_on_ranks

test_on_two_ranks = checks_on_ranks(CHECKS, 2)

"""Parameters outside of planned models are equal on all ranks, or refused."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from integrations.unplanned_parameters_ranks import CHECKS
from torchrun import checks_on_ranks

test_unplanned_parameters = checks_on_ranks(CHECKS, 2)

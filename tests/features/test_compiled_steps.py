"""Whole training steps under `torch.compile`, on two real processes."""

import pytest

from features.compiled_ranks import CHECKS
from torchrun import checks_on_ranks

test_a_compiled_program_is_one_graph_and_trains_as_it_does_uncompiled = pytest.mark.slow(
    # Each check compiles some programs on each rank.
    checks_on_ranks(CHECKS, 2, timeout=1500)
)

"""Losses, gradients and parameters that are not finite, on one device and on four processes."""

from collections.abc import Callable

import pytest

from run.loop.non_finite_ranks import CHECKS, DISTRIBUTED_CHECKS
from torchrun import checks_on_ranks


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_one_device(check: Callable[[], None]) -> None:
    check()


test_on_four_processes = checks_on_ranks(DISTRIBUTED_CHECKS, 4)

"""Random chains of operators that reduce, index, slide along or repeat sharded dimensions."""

from __future__ import annotations

import pytest

import shardwright as sw
from features.random_factors_ranks import check_losses_and_gradients
from random_cases import first_seed, random_cases
from random_factors import random_factors
from random_plans import random_plan
from torchrun import checks_on_ranks


@random_cases(3, slow=30)
def test_any_plan_equals_one_device(seed: int) -> None:
    net, args = random_factors(seed)
    graph = sw.capture(net, args)
    result = sw.check(net, args, {}, random_plan(graph, (2, 4, 6, 8)[seed % 4], seed))
    assert result.passes(1e-9), str(result)
    assert result.counted_bytes == result.planned_bytes


SEEDS = str(first_seed()), str(first_seed() + 8)
test_real_processes_equal_one_device = pytest.mark.slow(
    pytest.mark.random(checks_on_ranks([check_losses_and_gradients], 4, *SEEDS))
)

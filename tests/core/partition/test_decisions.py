"""Optimizer parallel: which values are refused, and how."""

from typing import Any

import pytest

from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.errors import StrategyError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"level": "level4"}, "level 'level4' is unknown\nuse one of level1, level2, level3"),
        ({"shard_size": 0}, "shard_size 0 must be a whole number of at least 1, or -1"),
        ({"shard_size": -2}, "shard_size -2 must be"),
        ({"shard_size": True}, "shard_size True must be"),
        ({"shard_size": 2.0}, "shard_size 2.0 must be"),
        ({"threshold": -1}, "threshold -1 must be a whole number of KiB, at least 0"),
        ({"threshold": "64"}, "threshold '64' must be"),
        ({"threshold": False}, "threshold False must be"),
    ],
)
def test_a_wrong_value_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        OptimizerParallel(**given)


def test_by_default_all_large_parameters_are_sharded_over_all_devices() -> None:
    assert OptimizerParallel() == OptimizerParallel("level1", -1, 64)

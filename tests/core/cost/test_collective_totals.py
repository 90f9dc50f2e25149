"""The collectives of a step, by kind and axes, are those that a plan counts."""

from typing import Any

import pytest

import shardwright as sw
from sample_models import llama
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.collective_totals import collective_totals


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "data_parallel"},
        {"mode": "recursive_programming", "mem_coeff": 0.1, "micro_batches": 2},
        {"mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}, "micro_batches": 4},
    ],
)
def test_their_bytes_add_up_to_those_of_the_plan(options: dict[str, Any]) -> None:
    net, args, kwargs = llama(batch=32, layers=2)
    sw.recompute(net.model.layers[0])
    plan = sw.plan(net, args, kwargs, devices=8, **options)
    partitioned = plan.partitioned
    totals = collective_totals(partitioned, 0, load_cluster("h100"))
    (sent,) = partitioned.step_bytes
    assert sum(total.bytes for total in totals) == sum(sent) > 0
    assert all(total.count >= 1 and total.seconds for total in totals)
    assert {total.seconds for total in collective_totals(partitioned, 0, None)} == {None}

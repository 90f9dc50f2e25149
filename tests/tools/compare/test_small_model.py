"""The small model that measures a machine: in which ways processes divide it."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.core.cost.clusters import load_cluster
from shardwright.models.build import example_batch
from shardwright.tools.compare.small_model import SmallModel, SmallSharding, shardings


@pytest.mark.parametrize("processes", [2, 3, 4, 6, 8, 11, 48])
def test_every_division_fills_all_processes_or_leaves_each_by_itself(processes: int) -> None:
    found = shardings(processes)
    assert {each.devices for each in found} == {1, processes}
    assert any(each.sharded for each in found) and any(each.recomputed for each in found)
    assert any(each.stages == 2 for each in found) == (processes % 2 == 0)


@pytest.mark.parametrize("processes", [2, 3, 6, 8, 11])
def test_every_division_divides_the_sizes_of_the_model(processes: int) -> None:
    model = SmallModel(processes)
    for each in model.shardings:
        plan = sw.plan(
            model.build_pinned(each),
            example_batch(model.sizes, each.samples),
            devices=each.data * each.tensor,
            mode="sharding_propagation",
            cluster=load_cluster("h100"),
            micro_batches=each.micro_batches,
        )
        assert plan.mesh.num_devices == each.devices // each.stages


def test_a_step_has_a_sample_for_each_device_in_each_micro_batch() -> None:
    assert SmallSharding(2, tensor=2, stages=2, micro_batches=6).samples == 48

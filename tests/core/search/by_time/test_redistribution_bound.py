"""What redistributions take at least, against what their steps take."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from core.search.toy import CLUSTERS, random_layout
from sample_models import captured, mlp
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.collectives import Links
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.search.by_time.redistribution_bound import RedistributionBound


@pytest.mark.parametrize("cluster", CLUSTERS, ids=["trees", "rings", "gloo"])
@pytest.mark.parametrize("devices", [8, 12, 16])
def test_the_steps_of_a_redistribution_take_no_less_than_the_bound(
    cluster: Cluster, devices: int
) -> None:
    mesh, draw = prime_mesh(devices), Random(devices)
    value = replace(captured(mlp, sizes=(16, 32)).parameters[0], shape=(48, 48, 48))
    num_bytes = value.numel * value.itemsize
    model = TimeModel(cluster, mesh)
    least = RedistributionBound(model.links)
    shares = []
    for _ in range(60):
        left, read = random_layout(mesh, draw, True), random_layout(mesh, draw, False)
        for differentiable in (True, False):
            path = redistribution_steps(left, read, value.shape, differentiable)
            seconds = sum(sum(model.step_seconds(step, value, differentiable)) for step in path)
            bound = least.seconds(left, read, num_bytes, differentiable)
            assert bound <= seconds * (1 + 1e-9), (left, read, path)
            shares.append(bound / seconds if seconds else 1.0)
    # So close that most of what is too much needs no steps.
    assert sorted(shares)[len(shares) // 2] > 0.4


def test_blocks_that_the_same_axes_choose_in_two_dimensions_count_as_held() -> None:
    # Half of the devices hold all that they read, so that the mean receives half of a block.
    mesh = prime_mesh(4)
    least = RedistributionBound(Links(CLUSTERS[0], mesh))
    one, other = mesh("a", "b"), mesh("b", "a")
    message = CLUSTERS[0].levels[0].latency
    received = least.seconds(one, other, 1e9, False) - message
    assert received == pytest.approx(1e9 / 8 / CLUSTERS[0].levels[0].rate)

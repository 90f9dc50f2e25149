"""What `test_devices.py` runs on every one of four processes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from shardwright.core.layout.layout import Layout
from shardwright.core.runtime.collectives import all_reduce
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.distributed import GroupClock
from torchrun import run_checks

MESH = Layout((2, 2), ("a", "b"))


def sums_along_each_axis() -> list[float]:
    devices = Devices.of_process(MESH, torch.device("cpu"))
    mine = torch.tensor(float(dist.get_rank()))
    return [float(all_reduce(devices.group((axis,)))(mine)) for axis in range(2)]


EXPECTED = [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def a_rank_makes_its_own_groups_only() -> None:
    with GroupClock() as groups:
        assert sums_along_each_axis() == EXPECTED[dist.get_rank()]
    assert groups.calls == 2


def a_group_of_some_ranks_hinders_no_others() -> None:
    dist.new_group([0])
    assert sums_along_each_axis() == EXPECTED[dist.get_rank()]


def another_matrix_of_the_same_ranks_has_the_same_groups() -> None:
    devices = Devices.of_process(Layout((4,), ("a",)), torch.device("cpu"))
    with GroupClock() as groups:
        first, second = (
            devices.with_matrix(Layout((2, 2), names), ((0,), (1,)))
            for names in (("a", "b"), ("c", "d"))
        )
    assert first.group((1,)).name == second.group((1,)).name
    assert groups.calls == 2


def another_matrix_belongs_to_the_same_model() -> None:
    devices = Devices.of_process(Layout((4,), ("a",)), torch.device("cpu"))
    devices.model = 2
    assert devices.with_matrix(MESH, ((0,), (1,))).model == 2


if __name__ == "__main__":
    run_checks(
        [
            a_rank_makes_its_own_groups_only,
            another_matrix_of_the_same_ranks_has_the_same_groups,
            another_matrix_belongs_to_the_same_model,
            a_group_of_some_ranks_hinders_no_others,
        ]
    )

"""What `test_exposed_communication.py` runs on each of two processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from shardwright.core.layout.layout import Layout
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.runtime.collectives import all_reduce
from shardwright.core.runtime.devices import Devices
from torchrun import run_checks

CPU = torch.device("cpu")
LATE = 0.5
"""Seconds."""


def rank_0_comes_late() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(LATE)


def who_comes_first_waits() -> None:
    devices = Devices.of_process(Layout((2,), ("a",)), CPU)
    reduce = all_reduce(devices.group((0,)))
    with devices.waits.enable(CPU):
        reduce(torch.ones(()))
        devices.waits.take_seconds()
        rank_0_comes_late()
        reduce(torch.ones(()))
        seconds = devices.waits.take_seconds()
    assert seconds is not None
    waited = LATE * dist.get_rank()
    assert 0.8 * waited < seconds < waited + 0.8 * LATE


def of_what_is_computed_meanwhile_nothing_is_waited_for() -> None:
    devices = Devices.of_process(Layout((2,), ("a",)), CPU)
    reduce = all_reduce(devices.group((0,)))
    with devices.waits.enable(CPU):
        pending = reduce.start(torch.ones(()))
        time.sleep(LATE)
        assert reduce.finish(pending, torch.float32) == 2
        seconds = devices.waits.take_seconds()
    assert seconds is not None and 0 < seconds < 0.8 * LATE


def a_stage_waits_for_the_micro_batches_of_the_other() -> None:
    torch.manual_seed(0)
    net = sw.WithLoss(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.MSELoss())
    batch = torch.randn(8, 8), torch.randn(8, 8)
    plan = sw.plan(net, batch, devices=2, stages=2, micro_batches=4)
    planned = sw.parallelize(net, plan, copy=True)
    assert isinstance(planned, ParallelModule)
    with planned.execution.devices.waits.enable(CPU):
        planned.train_step(*batch)
        seconds = [late_step(planned, batch) for _ in range(3)]
    # The second stage needs what the first makes; the first then waits for gradients only. A busy
    # machine makes both wait longer, so the shortest of three steps counts.
    waited = LATE * dist.get_rank()
    assert 0.8 * waited < min(seconds) < waited + 0.8 * LATE, seconds


def late_step(planned: ParallelModule, batch: tuple[torch.Tensor, ...]) -> float:
    """Return the seconds for which this rank waits in a step to which rank 0 comes late."""
    waits = planned.execution.devices.waits
    waits.take_seconds()
    rank_0_comes_late()
    planned.train_step(*batch)
    seconds = waits.take_seconds()
    assert seconds is not None
    return seconds


if __name__ == "__main__":
    run_checks(
        [
            who_comes_first_waits,
            of_what_is_computed_meanwhile_nothing_is_waited_for,
            a_stage_waits_for_the_micro_batches_of_the_other,
        ]
    )

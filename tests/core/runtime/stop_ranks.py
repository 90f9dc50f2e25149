"""What `test_stop_signals.py` runs on each of three ranks, of which one receives a signal."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from shardwright.core.agreement.collective import value_of_rank, values_of_ranks
from torchrun import run_checks

STEPS, STOPPED_AFTER = 6, 3


def model() -> sw.WithLoss:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    return sw.WithLoss(net, nn.CrossEntropyLoss())


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=numbers), torch.randint(3, (12,), generator=numbers)


def planned() -> tuple[nn.Module, torch.optim.Optimizer]:
    plan = sw.plan(model(), batch(0), devices=3, mode="data_parallel")
    net = sw.parallelize(model(), plan)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, stop: sw.StopSignals | None
) -> int:
    """The number of steps that are done once the ranks stop."""
    for step in steps:
        net(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop is not None and dist.get_rank() == 1 and step + 1 == STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop is not None and stop.requested():
            return step + 1
    return steps.stop


def check_all_ranks_stop_after_the_step_in_which_one_receives_a_signal() -> None:
    alone = model()
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.1), range(STEPS), None)
    handler = signal.getsignal(signal.SIGTERM)
    with TemporaryDirectory() as own:
        folder = Path(value_of_rank(own))
        net, optimizer = planned()
        with sw.StopSignals() as stop:
            done = train(net, optimizer, range(STEPS), stop)
            sw.save_checkpoint(folder, net, optimizer, position=sw.Position(step=done))
        assert stop.stopped_by == (1, signal.SIGTERM)
        assert values_of_ranks(done) == [3] * 3
        assert signal.getsignal(signal.SIGTERM) is handler
        other, other_optimizer = planned()
        position = sw.load_checkpoint(folder, other, other_optimizer)
        dist.barrier()
    train(other, other_optimizer, range(position.step, STEPS), None)
    with sw.whole(other) as whole:
        torch.testing.assert_close(dict(whole.state_dict()), dict(alone.state_dict()))


def check_without_a_signal_all_steps_are_made() -> None:
    net, optimizer = planned()
    with sw.StopSignals() as stop:
        for step in range(2):
            net(*batch(step)).backward()
            optimizer.step()
            assert not stop.requested()
    assert stop.stopped_by is None


CHECKS = (
    check_all_ranks_stop_after_the_step_in_which_one_receives_a_signal,
    check_without_a_signal_all_steps_are_made,
)


if __name__ == "__main__":
    run_checks(CHECKS)

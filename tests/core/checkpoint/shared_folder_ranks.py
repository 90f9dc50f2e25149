"""Saves on two ranks, into one folder and into a folder of each."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from shardwright.core.agreement.collective import value_of_rank
from torchrun import run_checks


def planned() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    options = {"mode": "data_parallel", "hsdp": {"level": "level1", "threshold": 0}}
    return sw.parallelize(net, sw.plan(net, (torch.ones(4, 8),), devices=2, **options))  # type: ignore[arg-type]


def folders_that_differ_between_ranks_are_refused_before_anything_is_written() -> None:
    net = planned()
    with tempfile.TemporaryDirectory() as own:
        different = pytest.raises(
            sw.CheckpointError,
            match=r"rank 1 does not write to the folder of rank 0.*\n.*same path",
        )
        with different:
            sw.save_checkpoint(own, net, None, position=sw.Position(1))
        with different:
            sw.save_state_dict(net, Path(own, "net.pt"))
        dist.barrier()
        assert not list(Path(own).iterdir())


def one_folder_may_have_two_names() -> None:
    net = planned()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(value_of_rank(own))
        link = Path(own, "link")
        link.symlink_to(folder)
        sw.save_checkpoint(link, net, None, position=sw.Position(1))
        sw.load_checkpoint(folder, net)
        dist.barrier()


def ranks_that_save_another_position_or_no_optimizer_are_refused() -> None:
    net = planned()
    optimizer = torch.optim.SGD(net.parameters())
    first = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as own:
        folder = Path(value_of_rank(own))
        with pytest.raises(sw.CheckpointError, match=r"rank 1 saves .*step=2.* rank 0 .*step=1"):
            sw.save_checkpoint(folder, net, position=sw.Position(1 if first else 2))
        with pytest.raises(sw.CheckpointError, match=r"with no optimizer, but rank 0 .* with SGD"):
            sw.save_checkpoint(folder, net, optimizer if first else None, position=sw.Position(1))
        dist.barrier()
        assert not list(Path(own).iterdir())


CHECKS = [
    ranks_that_save_another_position_or_no_optimizer_are_refused,
    folders_that_differ_between_ranks_are_refused_before_anything_is_written,
    one_folder_may_have_two_names,
]

if __name__ == "__main__":
    run_checks(CHECKS)

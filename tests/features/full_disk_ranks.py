"""Saves on two ranks of which one has a full disk."""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from shardwright.core.agreement.collective import value_of_rank
from torchrun import run_checks


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Context in which writing beyond a position fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _fails_on_all_ranks(name: str, save: Callable[[nn.Module, Path], object]) -> None:
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    plan = sw.plan(
        net, (torch.ones(4, 64),), devices=2, mode="data_parallel", hsdp={"threshold": 0}
    )
    sw.parallelize(net, plan)
    with tempfile.TemporaryDirectory() as own:
        path = Path(value_of_rank(own)) / name
        save(net, path)
        before = contents(path.parent)
        for full_rank in range(2):
            dist.barrier()
            disk = no_file_above(4096) if dist.get_rank() == full_rank else nullcontext()
            with disk, pytest.raises(sw.CheckpointError, match="File too large") as caught:
                save(net, path)
            assert str(path) in str(caught.value)
            dist.barrier()
            after = contents(path.parent)
            assert {file: after[file] for file in before} == before
        save(net, path)
        dist.barrier()


def a_failed_checkpoint_is_an_error_with_its_cause_on_all_ranks() -> None:
    _fails_on_all_ranks(
        "step-1",
        lambda net, path: sw.save_checkpoint(path.parent, net, position=sw.Position(1)),
    )


def a_failed_state_dict_is_an_error_with_its_cause_on_all_ranks() -> None:
    _fails_on_all_ranks("net.safetensors", sw.save_state_dict)


CHECKS = [
    a_failed_checkpoint_is_an_error_with_its_cause_on_all_ranks,
    a_failed_state_dict_is_an_error_with_its_cause_on_all_ranks,
]

if __name__ == "__main__":
    run_checks(CHECKS)

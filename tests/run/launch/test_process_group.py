"""The devices of ranks, which have to be of one kind and not the same, before they communicate."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import pytest

from forked import forked

pytestmark = pytest.mark.distributed

RANK = """
import sys
import torch
from shardwright.errors import ConfigError
from shardwright.run import World, process_group

count = int(sys.argv[1])
if count:
    kind = torch.device("cuda")
    torch.accelerator.current_accelerator = lambda check_available=False: kind
    torch.accelerator.device_count = lambda: count
try:
    with process_group(World.from_environment(), device=sys.argv[2]) as device:
        print(device)
except ConfigError as error:
    print(error)
"""
HOST = socket.gethostname()


def run(*ranks: tuple[int, str], device: str = "auto") -> list[str]:
    """What the ranks of one machine print.

    Args:
        ranks: for each the number of accelerators that it sees, and which those are.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environments: list[Mapping[str, str]] = [
        {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": visible,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(ranks)),
        }
        for rank, (_, visible) in enumerate(ranks)
    ]
    commands = [("-c", RANK, str(count), device) for count, _ in ranks]
    return [text.strip() for text in forked(commands, environments).printed]


def test_a_rank_that_sees_no_accelerator_is_one_error_on_each() -> None:
    error = f'device: "cpu" for rank 1 on {HOST}, "cuda" for rank 0 on {HOST}; '
    assert run((2, "0,1"), (0, "")) == [f"{error}all ranks of a run need the same"] * 2


def test_ranks_of_one_accelerator_are_one_error_on_each() -> None:
    assert (
        run((1, "0"), (1, "0")) == [f"ranks 0 and 1 on {HOST} use the same device: cuda:0 of 0"] * 2
    )


@pytest.mark.slow
def test_more_ranks_than_accelerators_compute_on_the_cpu_only_if_told_to() -> None:
    errors = run((2, "0,1"), (2, "0,1"), (2, "0,1"))
    assert {error.partition("\n")[0] for error in errors} == {
        "3 ranks were started on this machine, which has 2 cuda devices"
    }
    assert run((1, "0"), (1, "0"), device="cpu") == ["cpu", "cpu"]

"""The devices of ranks, which have to be of one kind and not the same, before they communicate."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import pytest

from forked import forked
from shardwright.errors import ConfigError
from shardwright.run.launch.process_group import World, join_store
from shardwright.run.launch.rendezvous_store import STORE_VARIABLE

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


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANK": "0", "WORLD_SIZE": "\x1b[2J"}, r"WORLD_SIZE is '\\x1b\[2J', not a number"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a number from 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2', not a number from 0 to 1\n"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is ''"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "nan"}, "LOCAL_RANK is 'nan'"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is '3'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "x"}, "RESTART_COUNT is"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is ''"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is missing"),
    ],
)
def test_variables_that_no_launcher_sets_are_one_error(
    variables: Mapping[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in _LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=name):
        join_store(World.from_environment(), timedelta(seconds=1))


_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", STORE_VARIABLE),
)

"""Ranks of two nodes, as processes of one machine."""

import json
import os
import socket
from collections.abc import Mapping

import pytest

from forked import forked

pytestmark = pytest.mark.distributed

RANK = """
import json, sys
from datetime import timedelta
import torch
from shardwright.errors import CommunicationError, ConfigError
from shardwright.run import World
from shardwright.run.launch import process_group as room
facts, device, torch.__version__, seconds = json.loads(sys.argv[1])
room.device_type_or_error = lambda world, choice: device
try:
    with room.check_same_run(World.from_environment(), facts, timedelta(seconds=seconds)):
        print("same")
except (ConfigError, CommunicationError) as error:
    print(type(error).__name__, error)
"""


def run(*ranks: Mapping[str, object], size: int = 2, seconds: float = 60) -> list[str]:
    """What each rank prints, a node of its own each, with its changes to what all have."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    commands, environments = [], []
    for rank, changes in enumerate(ranks):
        facts = {"train.steps": changes.get("steps", 5)}
        device, version = changes.get("device", "cpu"), changes.get("torch", "2.13.0")
        commands.append(["-c", RANK, json.dumps([facts, device, version, seconds])])
        environments.append(
            {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": str(changes.get("local_size", 1)),
                # Of these the ranks of a node that came later have seen fewer.
                "TORCHELASTIC_RESTART_COUNT": str(rank),
            }
        )
    return [text.strip() for text in forked(commands, environments).printed]


def test_ranks_of_the_same_run_go_on() -> None:
    assert run({}, {}) == ["same", "same"]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"steps": 6}, "train.steps: 6 for rank 1 on {0}, 5 for rank 0 on {0}"),
        pytest.param(
            {"torch": "2.12.1"},
            'torch: "2.12.1" for rank 1 on {0}, "2.13.0" for rank 0 on {0}',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"device": "cuda"},
            'device: "cuda" for rank 1 on {0}, "cpu" for rank 0 on {0}',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_difference_between_nodes_is_one_error_on_each_rank(
    changes: Mapping[str, object], difference: str
) -> None:
    error = difference.format(socket.gethostname())
    assert run({}, changes) == [f"ConfigError {error}; all ranks of a run need the same"] * 2


@pytest.mark.slow
def test_a_different_number_of_ranks_on_a_node_is_one_error_on_each_rank() -> None:
    host = socket.gethostname()
    difference = f"ranks on the node: 2 for rank 1 on {host}, 1 for rank 0 on {host}"
    wanted = f"ConfigError {difference}; all ranks of a run need the same"
    assert run({}, {"local_size": 2}, {}, size=3) == [wanted] * 3


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_for_a_collective() -> None:
    (line,) = run({}, seconds=2)
    assert line.startswith("CommunicationError not all 2 ranks joined within 2 s\ncheck the logs")

"""Two processes, of which rank 0 works something out for both, or ends before it has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

RANK = """
import os, sys, time
import torch.distributed as dist
from shardwright.errors import CommunicationError, MemoryLimitError
from shardwright.core.agreement import store as room
room.PATIENCE = 3.0
file, rank, endings = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)

def make():
    if rank:
        return "its own"
    if ending == "is killed":
        os.kill(os.getpid(), 9)
    if ending == "lacks memory":
        raise MemoryLimitError("too little", needed=7)
    if ending == "stumbles":
        raise ZeroDivisionError("by zero")
    if ending == "sends much":
        return os.urandom(6 * 2**20).hex()
    return "the result"

for ending in endings:
    if ending == "does not ask" and rank == 0:
        print("", flush=True)
        continue
    request = f"another of {rank}" if ending == "asks for another" else "the same"
    try:
        result = room.on_rank_0(f"thing that {ending}", request, make, str, str)
        print(result if len(result) < 99 else len(result), flush=True)
    except Exception as error:
        first_line = str(error).splitlines()[0]
        print(type(error).__name__, first_line, getattr(error, "needed", ""), flush=True)
os._exit(0)
"""
NO_MEMORY = "MemoryLimitError too little 7"
GONE = (
    "CommunicationError rank 0, which computes the thing that is killed,"
    " has exited or does not respond"
)
ENDS = {
    "succeeds": ("the result", "the result"),
    "sends much": ("12582912", "12582912"),
    "asks for another": ("the result", "its own"),
    "lacks memory": (NO_MEMORY, NO_MEMORY),
    "does not ask": ("", "its own"),
    "stumbles": (
        "ZeroDivisionError by zero",
        "PlanError rank 0 raised ZeroDivisionError: by zero",
    ),
    "is killed": (None, GONE),
}


def test_what_rank_0_makes_ends_alike_on_the_other(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank), *ENDS],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        lines = [line.strip() for line in process.communicate(timeout=240)[0].splitlines()]
        assert lines == [ends[rank] for ends in ENDS.values() if ends[rank] is not None]

"""Ranks that are forked are like those that `torchrun` starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forked import python
from torchrun import torchrun

SCRIPT = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
mine = (os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], sys.argv[1], sys.stdin.read())
every = [None] * 4
dist.all_gather_object(every, (mine, hash("a string")))
if dist.get_rank() == 0:
    print([told for told, _ in every], len({number for _, number in every}))
if sys.argv[1] == "fails":
    print("so it ends", file=sys.stderr, flush=True)
    sys.exit(3) if dist.get_rank() == 3 else time.sleep(1000)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.distributed
def test_ranks_have_their_places_and_hash_differently(script: Path) -> None:
    told = [(str(rank), "4", "well", "") for rank in range(4)]
    assert torchrun(script, 4, "well") == f"{told} 2\n"


@pytest.mark.distributed
def test_a_program_that_fails_says_so_and_the_next_one_runs() -> None:
    failed = python("-c", "import sys; print(sys.argv, __name__, flush=True); 1 / 0", "an argument")
    assert failed.status == 1
    assert failed.printed == ("['-c', 'an argument'] __main__\n",)
    assert failed.errors[0].endswith("ZeroDivisionError: division by zero\n")
    assert python("-c", "import os; os.kill(os.getpid(), 9)").status == -9
    assert python("-c", "raise SystemExit('why')").errors == ("why\n",)
    assert python("-c", "").status == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_fails_ends_the_others_and_not_those_of_the_next_launch(script: Path) -> None:
    started = time.monotonic()
    assert "so it ends" in torchrun(script, 4, "fails")
    assert time.monotonic() - started < 900, "the others sleep for 1000 s"
    assert torchrun(script, 4, "well").endswith(" 2\n")
    torchrun(script, 4, "fails", timeout=0.0)
    assert torchrun(script, 4, "well").endswith(" 2\n")

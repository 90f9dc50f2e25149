"""Launchers that are killed, ranks that are stopped, and who can reach a run."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest

from core.checkpoint.lock_holder import FORK
from shardwright.run.launch.launch import launch
from shardwright.run.launch.log_folder import LogFolder, LogWarning
from shardwright.run.launch.rank_failure import RankFailedError

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]

RANK = "import os, sys, time, signal; rank = int(os.environ['RANK'])\n"


@pytest.fixture
def logs(tmp_path: Path) -> LogFolder:
    folder = LogFolder(tmp_path / "log_output")
    folder.clear(2)
    return folder


def wait_for(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + 90
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process runs; an orphan that nobody waits for may stay as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def pids(logs: LogFolder) -> list[int]:
    texts = [logs.stdout(rank) for rank in range(2) if logs.stdout(rank).exists()]
    return [int(text) for text in (path.read_text().strip() for path in texts) if text]


def test_ranks_are_killed_with_their_launcher(logs: LogFolder) -> None:
    program = RANK + "print(os.getpid(), flush=True); time.sleep(100)"
    process = FORK.Process(target=launch, args=(["-c", program], 2, logs))
    process.start()
    wait_for(lambda: len(pids(logs)) == 2)
    process.kill()
    process.join()
    wait_for(lambda: not any(runs(pid) for pid in pids(logs)))


def test_the_error_of_a_rank_whose_log_folder_was_deleted_is_quoted(logs: LogFolder) -> None:
    """The run itself needs no log folder."""
    program = (
        f"import shutil; shutil.rmtree({str(logs.root)!r}, ignore_errors=True)\n"
        "if rank == 1: raise ValueError('no such sample')\n"
    )
    deleted = r"logs were deleted during the run, which has succeeded: .*rank\.0/stderr, .*stderr\n"
    with pytest.warns(LogWarning, match=deleted):
        launch(["-c", RANK + program.splitlines()[0]], 2, logs)
    with pytest.raises(RankFailedError) as caught:
        launch(["-c", RANK + "time.sleep(1 - rank)\n" + program], 2, logs)
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith("rank 1 exited with status 1; its log was deleted during the run: ")
    assert last == "ValueError: no such sample"


def test_a_rank_that_is_stopped_for_longer_than_the_timeout_ends_the_run(logs: LogFolder) -> None:
    """Although nobody waits for it, and no signal but SIGKILL reaches it."""
    program = "print(os.getpid(), flush=True)\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    started = time.monotonic()
    with pytest.raises(
        RankFailedError, match=r"^rank 1 \(process \d+\) was stopped by SIGSTOP; its log: .*err$"
    ):
        launch(["-c", RANK + program], 2, logs, timeout=timedelta(seconds=1))
    assert time.monotonic() - started > 1
    assert not any(runs(pid) for pid in pids(logs))


def test_a_rank_that_is_continued_in_time_goes_on(logs: LogFolder) -> None:
    program = "print(os.getpid(), flush=True)\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"

    def resume() -> None:
        wait_for(lambda: len(pids(logs)) == 2)
        time.sleep(1)
        os.kill(pids(logs)[1], signal.SIGCONT)

    thread = threading.Thread(target=resume)
    thread.start()
    launch(["-c", RANK + program], 2, logs, timeout=timedelta(seconds=60))
    thread.join()


TRAINS = """
import json, os, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from shardwright.run import World, process_group

def listening(pid):
    inodes = set()
    for each in Path(f"/proc/{{pid}}/fd").iterdir():
        try: inodes.add(os.readlink(each))
        except FileNotFoundError: pass
    lines = [line.split() for name in ("tcp", "tcp6")
             for line in Path(f"/proc/net/{{name}}").read_text().splitlines()[1:]]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{{line[9]}}]" in inodes]

@record
def main():
    world = World.from_environment()
    with process_group(world):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
        dist.all_reduce(torch.ones(1), group=group)
        print(json.dumps([listening(os.getpid()), listening(os.getppid())]), flush=True)
        dist.all_reduce(torch.ones(1), group=group)
        if world.rank == 1:
            print(int(time.time()), flush=True)
            os.kill(os.getpid(), {number})
        dist.all_reduce(torch.ones(1), group=group)
main()
"""

Run = tuple[LogFolder, RankFailedError, float]
"""Its logs, how it ended, and when."""


@pytest.fixture(scope="module")
def run_until(tmp_path_factory: pytest.TempPathFactory) -> Callable[[signal.Signals], Run]:
    """Runs two ranks until the second sends itself a signal; once for each signal."""

    @cache
    def run(number: signal.Signals) -> Run:
        logs = LogFolder(tmp_path_factory.mktemp("run") / "log_output")
        logs.clear(2)
        program = TRAINS.format(number=int(number))
        with pytest.raises(RankFailedError) as caught:
            launch(["-c", program], 2, logs, timeout=timedelta(seconds=5))
        return logs, caught.value, time.time()

    return run


@pytest.mark.parametrize(
    ("number", "verb"), [(signal.SIGSTOP, "stopped"), (signal.SIGKILL, "killed")]
)
def test_a_rank_that_others_wait_for_is_named_and_not_they(
    run_until: Callable[[signal.Signals], Run], number: signal.Signals, verb: str
) -> None:
    logs, error, ended = run_until(number)
    assert ended - int(logs.stdout(1).read_text().split()[-1]) < 60, "15 s where idle"
    first, *others = str(error).splitlines()
    assert first.startswith("rank 1 (process ")
    assert f") was {verb} by {number.name}; its log: " in first
    if number == signal.SIGSTOP:
        (other,) = others
        assert other.startswith("rank 0: communication failed in `main` (<string>, line ")
    else:
        (remedy,) = others
        assert remedy.startswith("the kernel kills processes when memory runs out")
        assert error.lost_ranks == {1}


def test_no_process_of_a_local_run_can_be_reached_from_elsewhere(
    run_until: Callable[[signal.Signals], Run],
) -> None:
    logs, _, _ = run_until(signal.SIGKILL)
    for rank in range(2):
        own, launchers = json.loads(logs.stdout(rank).read_text().splitlines()[0])
        assert own and launchers
        addresses = {address.partition(":")[0] for address in own + launchers}
        assert addresses == {"0100007F"}, "127.0.0.1"

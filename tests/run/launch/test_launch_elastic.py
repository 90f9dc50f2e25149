"""Going on with fewer devices, on ranks that are small programs without torch."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.run.launch.launch import DeviceRange, launch_elastic
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.rank_failure import RankFailedError

RANK = (
    "import os, sys, time, signal\n"
    "rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
    "print(size, flush=True)\n"
)
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def run(tmp_path: Path, program: str, minimum: int, **options: int) -> tuple[LogFolder, list[str]]:
    logs, said = LogFolder(tmp_path), list[str]()
    logs.clear(4)
    command = ["-c", RANK + program]

    def planned_for(left: int) -> tuple[Sequence[str], int]:
        # As if there were no plan for 3.
        return command, 2 if left == 3 else left

    launch_elastic(planned_for, command, 4, minimum, logs, on_restart=said.append, **options)
    return logs, said


@pytest.mark.distributed
def test_it_goes_on_with_the_devices_that_are_left(tmp_path: Path) -> None:
    printed = str(tmp_path / "printed")
    program = (
        f"if size == 4:\n    if rank == 0: open({printed!r}, 'w').close()\n"
        f"    while not os.path.exists({printed!r}): time.sleep(0.01)\n"
        f"    if rank == 2: {KILLED}\n    time.sleep(10_000)"
    )
    logs, said = run(tmp_path, program, minimum=2)
    (line,) = said
    assert line.startswith("rank 2 (process ")
    assert line.endswith(") was killed by SIGKILL; devices left: 3; continuing on 2")
    assert (logs.rank(0) / "stdout.attempt-0").read_text() == "4\n"
    assert logs.stdout(0).read_text() == "2\n"


@pytest.mark.distributed
def test_fewer_than_the_minimum_is_an_error(tmp_path: Path) -> None:
    program = f"if rank == 1: {KILLED}\ntime.sleep(10_000)"
    with pytest.raises(RankFailedError, match="only 3 devices remain, but --elastic needs 4"):
        run(tmp_path, program, minimum=4)


@pytest.mark.distributed
def test_an_error_loses_no_device_and_is_tried_again_as_often_as_asked(tmp_path: Path) -> None:
    folder = tmp_path / "1" / "rank.0"
    program = f"if rank == 1 and not os.path.exists({str(folder)!r} + '/stdout.attempt-0'): {{}}"
    logs, said = run(tmp_path, program.format("sys.exit(3)"), minimum=2, max_restarts=1)
    assert said == ["rank 1 exited with status 3; devices left: 4; continuing on 4"]
    assert logs.stdout(3).read_text() == "4\n"
    with pytest.raises(RankFailedError, match="exited with status 3"):
        run(tmp_path, "if rank == 1: sys.exit(3)", minimum=2, max_restarts=0)


@pytest.mark.parametrize("text", ["4", "4:2", "0:2", "a:b", "1:2:3", "-1:2"])
def test_a_range_that_cannot_be_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)--elastic {text} is not .*MIN:MAX"):
        DeviceRange.parse(text)


def test_a_range_is_read() -> None:
    assert DeviceRange.parse("2:8") == DeviceRange(2, 8)

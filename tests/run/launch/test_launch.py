"""The launcher, on ranks that are small programs without torch: a launch takes a second.

Ranks that are to be ended sleep for longer than a test may take.
"""

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from core.checkpoint.lock_holder import FORK
from shardwright.errors import ConfigError
from shardwright.run.launch import rendezvous_store
from shardwright.run.launch.launch import launch
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.rank_failure import RankFailedError, StoppedError

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]

RANK = "import os, sys, time, signal; rank = int(os.environ['RANK'])\n"
AFTER = "while not (os.path.exists({0!r}) and os.path.getsize({0!r})): time.sleep(0.01)"


@pytest.fixture
def logs(tmp_path: Path) -> LogFolder:
    folder = LogFolder(tmp_path / "log_output")
    folder.clear(2)
    return folder


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def after_rank_0(logs: LogFolder) -> str:
    """A line that waits until rank 0 has printed."""
    return AFTER.format(str(logs.stdout(0)))


def pids(logs: LogFolder) -> list[int]:
    return [int(logs.stdout(rank).read_text()) for rank in range(2)]


def test_every_rank_has_its_place_and_its_own_log_files(
    logs: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = (
        "print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], sys.argv[1:])\n"
        "print(os.environ['OMP_NUM_THREADS'], file=sys.stderr)"
    )
    handler = signal.getsignal(signal.SIGINT)
    launch(["-c", RANK + program, "an argument"], 2, logs)
    assert logs.stdout(0) == logs.root / "1" / "rank.0" / "stdout"
    threads = max(1, (os.cpu_count() or 1) // 2)
    for rank in range(2):
        assert logs.stdout(rank).read_text() == f"{rank} 2 {rank} ['an argument']\n"
        assert logs.stderr(rank).read_text() == f"{threads}\n"
    assert signal.getsignal(signal.SIGINT) is handler
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_killed_rank_is_named_and_ends_the_others_at_once(
    logs: LogFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    program = (
        f"print(os.getpid(), flush=True)\n{after_rank_0(logs)}\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(10_000)"
    )
    with pytest.raises(
        RankFailedError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL; its"
    ):
        launch(["-c", RANK + program], 2, logs)
    assert not any(alive(pid) for pid in pids(logs))
    assert capfd.readouterr().err == ""


def test_a_rank_that_exits_with_a_status_is_named_and_the_others_are_ended(logs: LogFolder) -> None:
    program = (
        f"print(os.getpid(), flush=True)\n{after_rank_0(logs)}\n"
        "if rank == 1: sys.exit(7)\ntime.sleep(10_000)"
    )
    with pytest.raises(RankFailedError, match=r"^rank 1 exited with status 7; its log: .*err"):
        launch(["-c", RANK + program], 2, logs)
    assert not any(alive(pid) for pid in pids(logs))


def test_the_first_ranks_traceback_is_told_not_its_consequences(logs: LogFolder) -> None:
    program = (
        "if rank == 0: time.sleep(10_000)\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    raise ValueError('the cause: this')\n"
        "main()"
    )
    with pytest.raises(RankFailedError) as caught:
        launch(["-c", RANK + program], 2, logs)
    message = str(caught.value)
    assert message.startswith("rank 1 failed; its log: ")
    assert message.endswith("ValueError: the cause: this")
    assert message.count("Traceback") == 1
    assert (caught.value.exception_type, caught.value.exception_message) == (
        "ValueError",
        "the cause: this",
    )


def launch_until_stopped(logs: LogFolder, said: Path) -> None:
    program = RANK + "print(os.getpid(), flush=True); time.sleep(10_000)"
    try:
        launch(["-c", program], 2, logs)
    except StoppedError as error:
        said.write_text(str(error))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launching_process_ends_all_ranks(
    logs: LogFolder, number: signal.Signals
) -> None:
    said = logs.root / "said"
    process = FORK.Process(target=launch_until_stopped, args=(logs, said))
    process.start()
    while not all(
        logs.stdout(rank).exists() and logs.stdout(rank).read_text() for rank in range(2)
    ):
        time.sleep(0.05)
    os.kill(process.pid or 0, number)
    process.join()
    assert said.read_text() == f"stopped by {number.name}; all ranks have been terminated"
    assert not any(alive(pid) for pid in pids(logs))


def test_an_earlier_runs_logs_are_removed(logs: LogFolder) -> None:
    logs.stdout(1).write_text("old")
    logs.clear(1)
    assert [path.name for path in logs.run.iterdir()] == ["rank.0"]


def test_all_ranks_are_started_again_as_often_as_asked(logs: LogFolder) -> None:
    program = (
        "again = os.environ['TORCHELASTIC_RESTART_COUNT']; print(again, flush=True)\n"
        f"{after_rank_0(logs)}\n"
        "if rank == 1 and again != '2': os.kill(os.getpid(), signal.SIGKILL)\n"
        "if again != '2': time.sleep(10_000)"
    )
    restarts = list[int]()
    launch(["-c", RANK + program], 2, logs, max_restarts=2, on_restart=restarts.append)
    assert restarts == [1, 2]
    for rank in range(2):
        names = ("stdout.attempt-0", "stdout.attempt-1", "stdout")
        assert [(logs.rank(rank) / name).read_text() for name in names] == ["0\n", "1\n", "2\n"]


def test_the_last_failure_is_told_when_there_is_no_restart_left(logs: LogFolder) -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1 exited with status 3"):
        launch(["-c", RANK + "if rank == 1: sys.exit(3)"], 2, logs, max_restarts=1)


def test_the_record_of_steps_is_kept_where_a_run_goes_on(logs: LogFolder) -> None:
    logs.steps(0).write_text("a step\n")
    logs.clear(1, keep_steps=True)
    assert logs.steps(0).read_text() == "a step\n"
    logs.clear(1)
    assert not logs.steps(0).exists()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_nothing_is_removed_through_links_in_place_of_a_ranks_folder(
    tmp_path: Path, kind: str
) -> None:
    logs, elsewhere = LogFolder(tmp_path / "logs"), tmp_path / "thesis"
    elsewhere.mkdir()
    (elsewhere / "stdout").write_text("precious")
    logs.rank(0).mkdir(parents=True)
    logs.stdout(0).write_text("earlier")
    if kind == "link":
        logs.rank(1).symlink_to(elsewhere)
    else:
        logs.rank(1).write_text("precious")
    with pytest.raises(ConfigError, match=r"rank\.1 is a link or a file.*\nmove it"):
        logs.clear(2)
    assert (elsewhere / "stdout").read_text() == "precious"
    assert logs.stdout(0).read_text() == "earlier"


def test_a_limit_of_open_files_that_is_too_low_is_refused_before_the_start(logs: LogFolder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (35, hard))
    try:
        with pytest.raises(ConfigError, match="need 36 open files, but the limit is 35\nraise"):
            launch(["-c", "raise SystemExit(1)"], 2, logs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not logs.stderr(0).exists()


@pytest.mark.parametrize("serves_scripts", [True, False])
def test_a_store_that_others_can_reach_is_served_to_scripts_only(
    logs: LogFolder, monkeypatch: pytest.MonkeyPatch, serves_scripts: bool
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    program = "print('MASTER_PORT' in os.environ)\n"
    stores: list[object] = []
    serve = rendezvous_store.serve_tcp_store

    def count(*arguments: Any, **options: Any) -> Any:
        stores.append(arguments)
        return serve(*arguments, **options)

    monkeypatch.setattr(rendezvous_store, "serve_tcp_store", count)
    launch(["-c", RANK + program], 2, logs, serves_scripts=serves_scripts)
    assert logs.stdout(0).read_text() == f"{serves_scripts}\n"
    assert bool(stores) == serves_scripts

"""Which rank is blamed for a failed run."""

import json
import signal
from pathlib import Path

import pytest

from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.rank_failure import RankEnd, RankError, first_failure

LOGS = LogFolder(Path("logs"))
WAITED = RankError("CommunicationError", "communication failed in x\nsee the logs", "Traceback …")
OWN = RankError("ValueError", "wrong", "Traceback …\nValueError: wrong")


@pytest.fixture(autouse=True)
def logs_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty log files of three ranks."""
    monkeypatch.chdir(tmp_path)
    for rank in range(3):
        file = Path("logs") / "1" / f"rank.{rank}" / "stderr"
        file.parent.mkdir(parents=True)
        file.touch()


def end(rank: int, status: int, time: float = 0.0, **options: object) -> RankEnd:
    return RankEnd(rank, 100 + rank, status, time, **options)  # type: ignore[arg-type]


ENDED = frozenset({15})


def message(*ends: RankEnd) -> str:
    return str(first_failure(ends, LOGS))


def test_a_killed_rank_is_named_not_those_that_failed_earlier_for_want_of_it() -> None:
    error = first_failure([end(0, 1, 1, error=WAITED), end(1, 1, 1), end(2, -9, 2)], LOGS)
    first, cause = str(error).splitlines()
    assert first == "rank 2 (process 102) was killed by SIGKILL; its log: logs/1/rank.2/stderr"
    assert cause.startswith("the kernel kills processes when memory runs out")
    assert error.lost_ranks == frozenset({2})


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGBUS, "or a disk or /dev/shm is full"),
        (signal.SIGSEGV, "PYTHONFAULTHANDLER=1"),
        (signal.SIGUSR1, "its log: logs/1/rank.2/stderr"),
    ],
)
def test_the_usual_cause_of_a_signal_is_named(number: signal.Signals, cause: str) -> None:
    told = message(end(0, 1, 1, error=WAITED), end(2, -number, 2))
    assert told.startswith(f"rank 2 (process 102) was killed by {number.name}; ")
    assert cause in told.splitlines()[-1]


def test_all_ranks_that_were_killed_are_named() -> None:
    error = first_failure([end(1, -9, 2), end(3, -7, 1), end(0, -15, signals=ENDED)], LOGS)
    assert str(error).startswith(
        "rank 3 (process 103) was killed by SIGBUS, rank 1 (process 101) was killed by SIGKILL; "
    )
    assert error.lost_ranks == frozenset({1, 3})


def test_a_rank_that_the_launcher_killed_is_not_taken_for_the_one_that_failed() -> None:
    error = first_failure([end(0, -9, 3, signals=frozenset({15, 9})), end(1, 7, 1)], LOGS)
    assert str(error).startswith("rank 1 exited with status 7; its log")
    assert error.lost_ranks == frozenset()


def test_a_rank_that_was_killed_while_the_launcher_ended_the_others_is_lost_too() -> None:
    ends = [end(0, -9, 1), end(1, -9, 2, signals=ENDED)]
    assert first_failure(ends, LOGS).lost_ranks == frozenset({0, 1})


def test_a_stopped_rank_is_named_with_what_the_others_waited_for() -> None:
    stopped = end(1, -9, 5, signals=frozenset({9}), stopped_by=19)
    assert message(end(0, 1, 3, error=WAITED), stopped).splitlines() == [
        "rank 1 (process 101) was stopped by SIGSTOP; its log: logs/1/rank.1/stderr",
        "rank 0: communication failed in x",
    ]


def test_a_rank_with_an_error_of_its_own_is_named_before_those_that_waited_for_it() -> None:
    said = message(end(0, 1, 1, error=WAITED), end(1, 1, 2, error=OWN), end(2, -15, signals=ENDED))
    assert said == f"rank 1 failed; its log: logs/1/rank.1/stderr\n{OWN.traceback}"


def test_a_rank_that_still_ran_when_the_others_gave_up_is_named() -> None:
    said = message(end(0, 1, 1, error=WAITED), end(1, -15, 4, signals=ENDED))
    assert said.splitlines() == [
        "rank 1 (process 101) did not answer the other ranks; its log: logs/1/rank.1/stderr",
        "rank 0: communication failed in x",
    ]


def test_without_a_better_reason_the_first_that_gave_up_is_named() -> None:
    said = message(end(0, 1, 2, error=WAITED), end(1, 1, 1, error=WAITED))
    assert said == "rank 1: communication failed in x; its log: logs/1/rank.1/stderr"


@pytest.mark.parametrize("size", [0, 1, 30, -1])
def test_an_error_file_that_was_not_completed_is_no_error(tmp_path: Path, size: int) -> None:
    assert RankError.read(tmp_path / "error.json") is None
    error = {"message": "ValueError: wrong", "extraInfo": {"py_callstack": "Traceback …\n"}}
    whole = json.dumps({"message": error})
    (tmp_path / "error.json").write_text(whole[:size])
    assert RankError.read(tmp_path / "error.json") is None
    (tmp_path / "error.json").write_text(whole)
    assert RankError.read(tmp_path / "error.json") == RankError(
        "ValueError", "wrong", "Traceback …"
    )

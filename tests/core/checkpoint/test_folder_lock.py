"""Locks of folders, between processes."""

import fcntl
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from core.checkpoint.lock_holder import FORK, holder
from features.full_disk_ranks import no_file_above
from shardwright.core.checkpoint import folder_lock
from shardwright.core.checkpoint.folder_lock import LOCK_FILE, lock_folders
from shardwright.errors import LockError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")


def test_a_folder_that_another_process_has_locked_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "MAX_WAIT_SECONDS", 0.1)
    with holder(tmp_path) as other:
        said = (
            rf"{re.escape(str(tmp_path))} is in use by process {other.pid} on {os.uname().nodename}"
            r" since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\nwait until that process ends, or choose"
        )
        with pytest.raises(LockError, match=said), lock_folders(tmp_path / "free", tmp_path):
            pass
        with lock_folders(tmp_path / "free"):
            pass


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        other.kill()
        other.join()
        assert (tmp_path / LOCK_FILE).exists()
        with lock_folders(tmp_path) as locks:
            assert len(locks) == 1


def test_a_run_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "MAX_WAIT_SECONDS", 500)
    with holder(tmp_path, seconds=0.5), lock_folders(tmp_path) as locks:
        assert len(locks) == 1


def test_processes_that_inherit_a_lock_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "MAX_WAIT_SECONDS", 0.1)
    with lock_folders(tmp_path) as locks:
        rank = subprocess.Popen(["sleep", "10000"], pass_fds=locks)
        # As if this process, which made the lock, were gone.
        path = (tmp_path / LOCK_FILE).rename(tmp_path / "held")
    path.rename(tmp_path / LOCK_FILE)
    (tmp_path / LOCK_FILE).write_text("process 1 on elsewhere since then")
    try:
        with pytest.raises(LockError, match="in use by process 1 on elsewhere since then\nwait"):
            lock_folders(tmp_path).__enter__()
    finally:
        rank.kill()
        rank.wait()
    with lock_folders(tmp_path):
        pass


def check_locks_nothing(folder: Path) -> None:
    with lock_folders(folder) as locks:
        assert locks == ()


def test_what_the_own_process_or_its_launcher_has_locked_is_left_as_it_is(tmp_path: Path) -> None:
    with lock_folders(tmp_path, tmp_path / "." / "") as locks:
        assert len(locks) == 1
        with lock_folders(tmp_path) as again:
            assert again == ()
        started = FORK.Process(target=check_locks_nothing, args=(tmp_path,))
        started.start()
        started.join(500)
        assert started.exitcode == 0
        assert (tmp_path / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_lock_created_is_removed_again_unless_it_is_used(tmp_path: Path) -> None:
    with lock_folders(tmp_path / "empty", tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LockError, match=r"file/\.lock: File exists"):
        lock_folders(tmp_path / "file").__enter__()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="does not support locks"), lock_folders(tmp_path) as locks:
        assert locks == ()


def take_turns(folder: Path, alone: Path) -> None:
    for _ in range(15):
        with lock_folders(folder):
            os.close(os.open(alone, os.O_CREAT | os.O_EXCL))
            time.sleep(0.001)
            alone.unlink()


def test_no_two_of_many_processes_hold_a_lock_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lock files are removed and made anew while others open them."""
    monkeypatch.setattr(folder_lock, "MAX_WAIT_SECONDS", 500)
    places = tmp_path / "locked", tmp_path / "alone"
    processes = [FORK.Process(target=take_turns, args=places) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
    assert [process.exitcode for process in processes] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["link", "hard link", "other file", "pipe", "dangling link"])
def test_only_a_lock_file_is_written(tmp_path: Path, kind: str) -> None:
    """A folder from a stranger could have a link to any file of the user there."""
    other, folder = tmp_path / "other", tmp_path / "run"
    folder.mkdir()
    if kind != "dangling link":
        other.write_text("precious")
    lock = folder / ".lock"
    if "hard" in kind:
        os.link(other, lock)
    elif "link" in kind:
        lock.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.write_text("precious")
    with pytest.raises(LockError, match=r"run/\.lock is not a lock file"), lock_folders(folder):
        pass
    assert os.path.lexists(lock)
    assert other.read_text() == "precious" if other.exists() else kind == "dangling link"
    assert kind != "other file" or lock.read_text() == "precious"


def test_a_full_disk_leaves_no_lock_and_no_new_folder(tmp_path: Path) -> None:
    with no_file_above(0), pytest.raises(LockError, match=r"\.lock: File too large"):
        lock_folders(tmp_path / "new").__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_a_path_that_the_file_system_cannot_encode_is_refused(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(LockError, match=r"cannot lock .*: not a path: it has control characters"),
        lock_folders(tmp_path / name),
    ):
        pass
    assert not list(tmp_path.iterdir())

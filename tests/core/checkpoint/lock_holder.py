"""A process that has locked a folder."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event as EventClass
from pathlib import Path

from shardwright.core.checkpoint.folder_lock import lock_folders

FORK = multiprocessing.get_context("fork")


def hold(folder: Path, locked: EventClass, seconds: float) -> None:
    with lock_folders(folder):
        locked.set()
        time.sleep(seconds)


@contextmanager
def holder(folder: Path, seconds: float = 10_000) -> Iterator[multiprocessing.process.BaseProcess]:
    """Another process that has locked `folder`."""
    locked = FORK.Event()
    process = FORK.Process(target=hold, args=(folder, locked, seconds))
    process.start()
    assert locked.wait(500)
    try:
        yield process
    finally:
        process.kill()
        process.join()

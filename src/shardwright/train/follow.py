"""Follows text files while another process writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

POLL_SECONDS = 0.1


class Follower:
    """A context in which each complete line appended to a file is handed to a function.

    The files need not exist yet. On leaving, what has been written by then is still handed over,
    a last line without its end of line included. The functions are called from one thread.
    """

    def __init__(self, on_line: Mapping[Path, Callable[[str], None]]) -> None:
        self._on_line = on_line
        self._position = dict.fromkeys(on_line, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow-logs", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._read_new_lines()
        self._read_new_lines(also_unfinished=True)

    def _read_new_lines(self, also_unfinished: bool = False) -> None:
        for path, on_line in self._on_line.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._position[path])
                new = file.read()
            end = len(new) if also_unfinished else new.rfind(b"\n") + 1
            self._position[path] += end
            for line in new[:end].decode(errors="replace").splitlines():
                on_line(line)

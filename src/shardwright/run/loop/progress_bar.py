"""Console output of a run: log lines of its ranks and, on a terminal, a live progress bar."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.errors import ShardwrightWarning, warn_user
from shardwright.run.loop.step_log import StepRecord


class LiveProgress(Progress):
    """Context that prints lines and, if the console is a terminal, a progress bar below them.

    Args:
        console: receives the output.
        num_steps: number of steps of the run, the length of the bar.
        steps_per_epoch: number of steps per epoch.
    """

    def __init__(self, console: Console, num_steps: int, steps_per_epoch: int) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._steps_per_epoch = steps_per_epoch
        self._task = self.add_task("starting", total=num_steps, loss="-", speed="")

    def line(self, text: str) -> None:
        """Print `text` verbatim above the bar."""
        # Brackets in the text of a program are not markup of Rich.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: StepRecord) -> None:
        """Show a finished step on the bar, which moves back after a restart from a checkpoint."""
        self.update(
            self._task,
            completed=step.epoch * self._steps_per_epoch + step.step + 1,
            description=f"epoch {step.epoch} step {step.step}",
            loss=f"{step.loss:.6f}",
            speed=f"{step.samples_per_second:,.0f} samples/s",
        )


POLL_SECONDS = 0.1
"""Polling interval of followed files, in seconds."""


@contextmanager
def follow_files(on_line: Mapping[Path, Callable[[str], None]]) -> Iterator[None]:
    """Context that follows growing files, like `tail -F`.

    The files need not exist yet. If a file is replaced, the old file is read to its end, then
    the new one from its beginning. On exit, the rest of each file is read, including a last line
    without a newline.

    Args:
        on_line: by file, the function to call with each appended line. All functions are called
            from one background thread. If one raises OSError, a warning follows, and no lines do.
    """
    files = [_FollowedFile(path, function) for path, function in on_line.items()]
    ended = threading.Event()

    def follow() -> None:
        try:
            while not ended.wait(POLL_SECONDS):
                for file in files:
                    file.read()
            # Once more, for lines written since the last read.
            for file in files:
                file.read()
                file.finish()
        except OSError as error:
            # Such as a full disk to which stdout is redirected. It does not end the run.
            warn_user(
                f"lines of the run are no longer printed: {error.strerror}\n"
                f"read them in {files[0].path}",
                ShardwrightWarning,
            )
        finally:
            for file in files:
                file.close()

    thread = threading.Thread(target=follow, name="follow-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _FollowedFile:
    """Reader of the lines appended to a file; if another file replaces it, reads that too."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self.path, self._on_line = path, on_line
        self._file: BinaryIO | None = None
        self._unfinished = b""

    def read(self) -> None:
        """Call `on_line` with each line appended to the file or to the file that replaced it."""
        for file in self._open_files_to_read():
            # A read may end within a line, or within a character of several bytes.
            *lines, self._unfinished = (self._unfinished + file.read()).split(b"\n")
            for line in lines:
                self._on_line(line.decode(errors="replace"))

    def finish(self) -> None:
        """Call `on_line` with the last line, even if it is incomplete, and close the file."""
        if self._unfinished:
            self._on_line(self._unfinished.decode(errors="replace"))
            self._unfinished = b""
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_files_to_read(self) -> Iterator[BinaryIO]:
        if self._file is not None:
            # Checked before reading, so that nothing written before the replacement is missed.
            is_replaced = self._was_replaced(self._file)
            yield self._file
            if not is_replaced:
                return
            self.finish()
        if self.path.exists():
            self._file = self.path.open("rb")
            yield self._file

    def _was_replaced(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            # The old file is gone, and the new one does not exist yet.
            return False

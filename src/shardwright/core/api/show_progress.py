"""Show the progress of long calls: a bar in terminals and notebooks, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.errors import printable
from shardwright.progress import OnProgress, RemainingTime, ignore_progress

SILENT_SECONDS = 20.0
"""Seconds of a call before its first line in the log of a job."""

SECONDS_PER_LINE = 60.0
"""Minimum seconds between two lines in the log of a job."""


@contextmanager
def show_progress(enabled: bool | None = None) -> Iterator[OnProgress]:
    """Context manager that yields a callback for `on_progress=`.

    The callback shows a transient progress bar in a terminal and in a notebook with `ipywidgets`,
    and lines with the elapsed seconds elsewhere. Phases with a known number of steps show an
    estimate of the remaining time. Output goes to stderr.

    Args:
        enabled: whether to show progress. Where no bar is shown, True shows a line per phase; None
            shows a line per phase in notebooks and, elsewhere, one line per minute of calls that
            take long.

    >>> import torch
    >>> from torch import nn
    >>> import shardwright as sw
    >>> net, batch = nn.Linear(8, 8), (torch.zeros(4, 8),)
    >>> with sw.show_progress() as on_progress:
    ...     plan = sw.plan(net, batch, devices=2, on_progress=on_progress)
    """
    notebook = Console().is_jupyter
    # Without ipywidgets `rich` cannot update a bar in a notebook.
    bar = bool(find_spec("ipywidgets")) if notebook else sys.stderr.isatty()
    if enabled is False:
        yield ignore_progress
    elif bar:
        # The current `sys.stderr`: a capture replaces it by a silent stream, and reports progress.
        console = PrintableConsole() if notebook else PrintableConsole(file=sys.stderr)
        with _show_progress_bar(console) as on_progress:
            yield on_progress
    elif enabled or notebook:
        yield _make_line_reporter()
    else:
        # The log of a job stays short, and shows that a long call goes on.
        yield _make_line_reporter(SILENT_SECONDS, SECONDS_PER_LINE)


@contextmanager
def _show_progress_bar(console: Console) -> Iterator[OnProgress]:
    # Without markup, as names of modules may have brackets.
    doing = TextColumn("{task.description}", markup=False)
    time_column = TextColumn("{task.fields[left]}")
    columns = (SpinnerColumn(), doing, BarColumn(), TimeElapsedColumn(), time_column)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task, time_left = bar.add_task("starting", total=None, left=""), RemainingTime()

        def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
            remaining = _format_remaining_time(time_left.seconds(done, of))
            # Without a total `rich` shows a bar that moves back and forth.
            bar.update(task, description=doing, completed=done, total=of or None, left=remaining)

        yield on_progress


def _make_line_reporter(silent_seconds: float = 0.0, seconds_per_line: float = 0.0) -> OnProgress:
    """Return a callback that prints lines to stderr.

    Args:
        silent_seconds: seconds before the first line.
        seconds_per_line: minimum seconds between two lines.
    """
    start, time_left, stream = time.monotonic(), RemainingTime(), sys.stderr
    next_line = silent_seconds

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        nonlocal next_line
        remaining = _format_remaining_time(time_left.seconds(done, of))
        elapsed = time.monotonic() - start
        if elapsed < next_line:
            return
        next_line = elapsed + seconds_per_line
        count = f" ({done + 1} of {of}{remaining and ', '}{remaining})" if of else ""
        # A log that cannot be written, as on a full disk, does not end the call.
        with suppress(OSError):
            print(printable(f"{elapsed:6.1f} s  {doing}{count}"), file=stream, flush=True)

    return on_progress


def _format_remaining_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds_left = divmod(round(seconds), 60)
    # Below 3 minutes, a number of minutes would hardly change while the user watches.
    return f"{minutes} min left" if minutes > 2 else f"{minutes * 60 + seconds_left} s left"

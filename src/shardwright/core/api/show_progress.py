"""Show the progress of long calls: a bar in terminals and notebooks, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.errors import printable
from shardwright.progress import OnProgress, RemainingTime, ignore_progress


@contextmanager
def show_progress(enabled: bool | None = None) -> Iterator[OnProgress]:
    """Context manager that yields a callback for `on_progress=`.

    The callback shows a transient progress bar in a terminal and in a notebook with `ipywidgets`,
    and one line per phase with the elapsed seconds elsewhere. Phases with a known number of steps
    show an estimate of the remaining time. Output goes to stderr.

    Args:
        enabled: whether to show progress; None shows it in terminals and notebooks only.

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
    # By default nothing is shown outside of terminals and notebooks, such as in the log of a job.
    if enabled is False or not (bar or notebook or enabled):
        yield ignore_progress
    elif bar:
        # The current `sys.stderr`: a capture replaces it by a silent stream, and reports progress.
        console = PrintableConsole() if notebook else PrintableConsole(file=sys.stderr)
        with _show_progress_bar(console) as on_progress:
            yield on_progress
    else:
        yield _make_line_reporter()


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


def _make_line_reporter() -> OnProgress:
    start, time_left, stream = time.monotonic(), RemainingTime(), sys.stderr

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        remaining = _format_remaining_time(time_left.seconds(done, of))
        count = f" ({done + 1} of {of}{remaining and ', '}{remaining})" if of else ""
        elapsed = time.monotonic() - start
        print(printable(f"{elapsed:6.1f} s  {doing}{count}"), file=stream, flush=True)

    return on_progress


def _format_remaining_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds_left = divmod(round(seconds), 60)
    # Below 3 minutes, a number of minutes would hardly change while the user watches.
    return f"{minutes} min left" if minutes > 2 else f"{minutes * 60 + seconds_left} s left"

"""What a person sees of a long call, on stderr, while it lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwright.progress import OnProgress, silent

ShowProgress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Say on stderr what is being done; by default where it is a terminal.",
        show_default=False,
    ),
]


@contextmanager
def progress(wanted: bool | None = None) -> Iterator[OnProgress]:
    """Shows on stderr what is told: on a terminal as one line with a bar, which goes away in the
    end; elsewhere nothing, or, if it is wanted, a line for each part with the seconds before it."""
    terminal = sys.stderr.isatty()
    if wanted is False or not (terminal or wanted):
        yield silent
    elif terminal:
        with _bar(Console(stderr=True)) as told:
            yield told
    else:
        yield _lines()


@contextmanager
def _bar(console: Console) -> Iterator[OnProgress]:
    doing = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), doing, BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as shown:
        task = shown.add_task("read", total=None)

        def told(doing: str, done: int = 0, of: int = 0) -> None:
            shown.update(task, description=doing, completed=done, total=of or None)

        yield told


def _lines() -> OnProgress:
    started = time.monotonic()

    def told(doing: str, done: int = 0, of: int = 0) -> None:
        count = f" ({done + 1} of {of})" if of else ""
        typer.echo(f"{time.monotonic() - started:6.1f} s  {doing}{count}", err=True)

    return told

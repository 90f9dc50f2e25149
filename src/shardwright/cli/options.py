"""Options that several commands have."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwright.config import Run
from shardwright.progress import OnProgress, silent
from shardwright.train.process_group import launched

ConfigArgument = Annotated[Path, typer.Argument(help="The YAML configuration.", show_default=False)]
DevicesOption = Annotated[int, typer.Option(help="Number of devices.", show_default=False)]


def _coefficient(given: str) -> str:
    """Raises: typer.BadParameter: neither a positive number nor `auto`."""
    wrong = typer.BadParameter(f"{given!r} is neither a positive number nor auto")
    try:
        fits = given == "auto" or 0 < float(given) < inf
    except ValueError:
        raise wrong from None
    if not fits:
        raise wrong
    return given


MemCoeffOption = Annotated[
    str | None,
    typer.Option(
        help="Weight of memory against communication, instead of the configuration's; auto: the"
        " smallest that fits into memory.",
        metavar="NUMBER|auto",
        callback=lambda given: None if given is None else _coefficient(given),
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(help="Plan by the seconds of a step on it: `local`, `h100`, …, or a YAML file."),
]
LogCostsOption = Annotated[bool, typer.Option("--log-costs", help="Log what each cut would cost.")]


def run_of(
    config: Path,
    mem_coeff: str | None = None,
    log_costs: bool = False,
    resume: bool = False,
    cluster: str | None = None,
    on_progress: OnProgress = silent,
) -> Run:
    """The run of a configuration with the command line's options in place of its own."""
    run = Run.from_file(config)
    _say_what_is_taken_otherwise(run, config)
    changes: dict[str, object] = {}
    if mem_coeff is not None:
        changes["mem_coeff"] = mem_coeff if mem_coeff == "auto" else float(mem_coeff)
    if log_costs:
        changes["log_costs"] = True
    if cluster is not None:
        # A path on the command line is relative to where it is typed.
        path = Path(cluster)
        changes["cluster"] = str(path.absolute()) if path.is_file() else cluster
    parallel = run.config.parallel.model_copy(update=changes)
    if parallel.log_costs or parallel.stages == "auto":
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    train = run.config.train.model_copy(update={"resume": resume or run.config.train.resume})
    changed = run.config.model_copy(update={"parallel": parallel, "train": train})
    return replace(run, config=changed, on_progress=on_progress)


def _say_what_is_taken_otherwise(run: Run, config: Path) -> None:
    """Keys of a file of the MindFormers shape that mean nothing here, or another thing than they
    say, once."""
    if run.language is None or launched():
        return
    for note in run.language.notes:
        typer.echo(f"{config}: {note}", err=True)
    if run.language.unused:
        count, names = len(run.language.unused), ", ".join(run.language.unused)
        keys = "1 key means" if count == 1 else f"{count} keys mean"
        typer.echo(f"{config}: {keys} nothing here: {names}", err=True)


def say_batch(run: Run, config: Path, devices: int) -> None:
    """Of a file of the MindFormers shape, how its global batch comes about."""
    if run.language is not None and not launched():
        typer.echo(f"{config}: {run.language.batch.formula(devices)}", err=True)


ShowProgressOption = Annotated[
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

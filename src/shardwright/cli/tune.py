"""`shardwright tune`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.table import Table

from shardwright.cli.app import app
from shardwright.cli.options import (
    ClusterOption,
    ConfigArgument,
    DevicesOption,
    ShowProgressOption,
    progress,
    run_of,
)
from shardwright.compare.tune import Trial, Tuning
from shardwright.compare.tune import tune_mem_coeff as tuned
from shardwright.cost.memory import binary

WIDTH = 120
NAMES = 3
"""How many operators of a kind are named."""


@app.command("tune")
def tune_command(
    config: ConfigArgument,
    devices: DevicesOption,
    cluster: ClusterOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    show_progress: ShowProgressOption = None,
) -> None:
    """Show what the search chooses for values of mem_coeff, each four times the one before, from
    which value on each operator is cut, and which value to take. Exit status 1 where nothing fits
    into memory."""
    with progress(show_progress) as told:
        found = tuned(run_of(config, cluster=cluster, on_progress=told), devices)
    if json:
        best = None if found.best is None else found.best.mem_coeff
        typer.echo(dumps({**asdict(found), "best": best}, indent=1))
    else:
        Console(width=WIDTH, highlight=False).print(
            Group(tuning_table(found), *_plans(found), *_break_evens(found), _advice(found))
        )
    if found.best is None:
        raise typer.Exit(1)


def tuning_table(found: Tuning) -> Table:
    """A row for each value."""
    over = "" if found.cluster is None else f" of {found.cluster}"
    shown = Table(title=f"{found.devices} devices{over}", title_justify="left")
    for name in ("mem_coeff", "plan", "stages", "bytes sent", "memory", "time of a step"):
        shown.add_column(name, justify="right")
    for trial in found.trials:
        shown.add_row(
            f"{trial.mem_coeff:g}",
            str(trial.plan),
            str(trial.stages),
            f"{trial.bytes:,}",
            binary(trial.memory) + ("" if trial.fits else " too large"),
            "-" if trial.seconds is None else f"{trial.seconds:.4g} s",
        )
    return shown


def _plans(found: Tuning) -> list[str]:
    """For each distinct plan how its main operators are cut."""
    distinct = {trial.plan: trial for trial in reversed(found.trials)}
    return [line for number in sorted(distinct) for line in _plan(distinct[number])]


def _plan(trial: Trial) -> list[str]:
    ways: dict[str, list[str]] = {}
    for name, cut in trial.cuts.items():
        ways.setdefault(" ".join(f"{f}/{n}" for f, n in cut.items()) or "whole", []).append(name)
    return [f"plan {trial.plan}:", *(f"  {way}: {_named(names)}" for way, names in ways.items())]


def _break_evens(found: Tuning) -> list[str]:
    values: dict[str, list[str]] = {}
    for name, value in sorted(found.break_evens.items(), key=lambda entry: entry[1]):
        values.setdefault(f"{value:.6g}", []).append(name)
    title = ["break-even, above which the symbolic search cuts the batch rather than nothing:"]
    return [*title, *(f"  {v}: {_named(names)}" for v, names in values.items())] if values else []


def _named(names: list[str]) -> str:
    more = f" … ({len(names)} operators)" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more


def _advice(found: Tuning) -> str:
    best = found.best
    if best is None:
        return f"no value fits into {binary(found.limit or 0)}: shard parameters or recompute"
    why = "the least time" if best.seconds is not None else "the fewest operators left whole"
    fits = "" if found.limit is None else f", and fits into {binary(found.limit)}"
    return f"take mem_coeff {best.mem_coeff:g}: {why}{fits}"

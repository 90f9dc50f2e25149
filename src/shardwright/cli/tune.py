"""The command `tune`, which recommends a value of `mem_coeff`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from shardwright.cli.app import app, echo
from shardwright.cli.options import (
    ClusterOption,
    ConfigArgument,
    DevicesOption,
    ProgressOption,
    load_run,
)
from shardwright.core.api.show_progress import show_progress
from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.rows import seconds_text
from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.tools.compare.tune import Trial, Tuning, tune_mem_coeff

TABLE_WIDTH = 120
MAX_LISTED_NAMES = 3
"""Maximum number of operators listed per line."""


@app.command("tune")
def tune_command(
    config: ConfigArgument,
    devices: DevicesOption,
    cluster: ClusterOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    progress: ProgressOption = None,
) -> None:
    """Plan with several values of `mem_coeff`, and recommend one.

    Each value is four times the previous one. Also prints the value above which each operator is
    sharded. Exit status 1 if no value fits into memory.
    """
    with show_progress(progress) as on_progress:
        run = load_run(config, cluster=cluster, on_progress=on_progress)
        tuning = tune_mem_coeff(run, devices)
    if json:
        # A property, which `asdict` leaves out.
        best = None if tuning.best is None else tuning.best.mem_coeff
        echo(dumps({**asdict(tuning), "best": best}, indent=1))
    else:
        PrintableConsole(width=TABLE_WIDTH, highlight=False).print(
            Group(
                tuning_table(tuning),
                *_format_plan_lines(tuning),
                *_format_break_even_lines(tuning),
                _format_recommendation(tuning),
            )
        )
    if tuning.best is None:
        raise typer.Exit(1)


def tuning_table(tuning: Tuning) -> Table:
    """Return a table with a row for each tried value of `mem_coeff`."""
    cluster = "" if tuning.cluster is None else f" of {tuning.cluster}"
    table = Table(title=f"{tuning.devices} devices{cluster}", title_justify="left")
    for name in ("mem_coeff", "plan", "stages", "bytes sent", "peak memory", "step time"):
        table.add_column(name, justify="right")
    for trial in tuning.trials:
        table.add_row(
            f"{trial.mem_coeff:g}",
            str(trial.plan),
            str(trial.stages),
            f"{trial.bytes:,}",
            bytes_text(trial.memory) + ("" if trial.fits else " over limit"),
            "-" if trial.seconds is None else seconds_text(trial.seconds),
        )
    return table


def _format_plan_lines(tuning: Tuning) -> list[str]:
    """Return lines with the shardings of the main operators in each distinct plan."""
    # Reversed, so that the first trial with a plan stands for the plan.
    distinct = {trial.plan: trial for trial in reversed(tuning.trials)}
    return [line for index in sorted(distinct) for line in _format_sharding_lines(distinct[index])]


def _format_sharding_lines(trial: Trial) -> list[str]:
    # From the shards of factors, as text, to the operators that have them.
    operators: dict[str, list[str]] = {}
    for name, factors in trial.cuts.items():
        cuts = " ".join(f"{factor}/{count}" for factor, count in factors.items())
        operators.setdefault(cuts or "replicated", []).append(name)
    lines = (f"  {cuts}: {_join_names(names)}" for cuts, names in operators.items())
    return [f"plan {trial.plan}:", *lines]


def _format_break_even_lines(tuning: Tuning) -> list[str]:
    operators: dict[str, list[str]] = {}
    for name, value in sorted(tuning.break_evens.items(), key=lambda entry: entry[1]):
        # Values that agree in six digits share a line.
        operators.setdefault(f"{value:.6g}", []).append(name)
    if not operators:
        return []
    title = "break-even values, above which the symbolic search shards the batch:"
    return [title, *(f"  {value}: {_join_names(names)}" for value, names in operators.items())]


def _join_names(names: list[str]) -> str:
    more = f" … ({len(names)} operators)" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more


def _format_recommendation(tuning: Tuning) -> str:
    best, limit = tuning.best, tuning.limit
    if best is None:
        limit_text = bytes_text(limit or 0)
        return f"no value fits into {limit_text}: shard parameters or recompute activations"
    # Without a cluster, no step time is predicted.
    reason = "shortest step time" if best.seconds is not None else "fewest replicated operators"
    fits = "" if limit is None else f", fits into {bytes_text(limit)}"
    return f"use mem_coeff {best.mem_coeff:g}: {reason}{fits}"

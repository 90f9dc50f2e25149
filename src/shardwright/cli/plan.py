"""`shardwright plan` and `shardwright explain`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright.cli.app import app
from shardwright.cli.options import (
    Cluster,
    Config,
    Devices,
    LogCosts,
    MemCoeff,
    run_of,
    say_batch,
)
from shardwright.cli.progress import ShowProgress, progress
from shardwright.plan.table import WIDTH, text
from shardwright.saved_graphs import SavedGraphs

LEAST_WIDTH = 100


@app.command("plan")
def plan_command(
    config: Config,
    devices: Devices,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    save_graphs: Annotated[
        Path | None,
        typer.Option(help="Save the graph before and after planning, and rank 0's program, here."),
    ] = None,
    mem_coeff: MemCoeff = None,
    log_costs: LogCosts = False,
    cluster: Cluster = None,
    every: Annotated[
        bool, typer.Option("--every", help="Also operators that only follow their neighbours.")
    ] = False,
    show_progress: ShowProgress = None,
) -> None:
    """Search a plan and print it. Needs no devices and starts no processes."""
    with progress(show_progress) as told:
        run = run_of(config, mem_coeff, log_costs, cluster=cluster, on_progress=told)
        plan = run.plan(devices, SavedGraphs(save_graphs) if save_graphs is not None else None)
        told("table")
        shown = plan.to_json() if json else text(plan, every, _width())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        plan.save(out)
    say_batch(run, config, devices)
    typer.echo(shown)


def _width() -> int:
    """The terminal's, where the plan goes to one that is wide enough for a table."""
    return max(Console().width, LEAST_WIDTH) if sys.stdout.isatty() else WIDTH


@app.command()
def explain(
    config: Config,
    name: Annotated[str, typer.Argument(help="An operator, by its module path.")],
    devices: Devices,
    mem_coeff: MemCoeff = None,
    log_costs: LogCosts = False,
    cluster: Cluster = None,
) -> None:
    """Say how one operator is cut, and why."""
    run = run_of(config, mem_coeff, log_costs, cluster=cluster)
    typer.echo(run.plan(devices).explain(name))

"""`shardwright plan` and `shardwright explain`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardwright.api import Check, check
from shardwright.api.save_graphs import SavedGraphs
from shardwright.cli.app import app
from shardwright.cli.options import (
    ClusterOption,
    ConfigArgument,
    DevicesOption,
    LogCostsOption,
    MemCoeffOption,
    ShowProgressOption,
    progress,
    run_of,
    say_batch,
)
from shardwright.plan import Plan
from shardwright.plan.diff import Difference, differences
from shardwright.plan.table import WIDTH, plan_text

LEAST_WIDTH = 100


@app.command("plan")
def plan_command(
    config: ConfigArgument,
    devices: DevicesOption,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    save_graphs: Annotated[
        Path | None,
        typer.Option(help="Save the graph before and after planning, and rank 0's program, here."),
    ] = None,
    mem_coeff: MemCoeffOption = None,
    log_costs: LogCostsOption = False,
    cluster: ClusterOption = None,
    every: Annotated[
        bool, typer.Option("--every", help="Also operators that only follow their neighbors.")
    ] = False,
    show_progress: ShowProgressOption = None,
) -> None:
    """Search a plan and print it. Needs no devices and starts no processes."""
    with progress(show_progress) as told:
        run = run_of(config, mem_coeff, log_costs, cluster=cluster, on_progress=told)
        plan = run.plan(devices, SavedGraphs(save_graphs) if save_graphs is not None else None)
        told("table")
        shown = plan.to_json() if json else plan_text(plan, every, _width())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        plan.save(out)
    say_batch(run, config, devices)
    typer.echo(shown)


def _width() -> int:
    """The terminal's, where the plan goes to one that is wide enough for a table."""
    return max(Console().width, LEAST_WIDTH) if sys.stdout.isatty() else WIDTH


@app.command("explain")
def explain_command(
    config: ConfigArgument,
    name: Annotated[str, typer.Argument(help="An operator, by its module path.")],
    devices: DevicesOption,
    mem_coeff: MemCoeffOption = None,
    log_costs: LogCostsOption = False,
    cluster: ClusterOption = None,
) -> None:
    """Say how one operator is cut, and why."""
    run = run_of(config, mem_coeff, log_costs, cluster=cluster)
    typer.echo(run.plan(devices).explain(name))


@app.command("check")
def check_command(
    config: ConfigArgument,
    devices: DevicesOption,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    mem_coeff: MemCoeffOption = None,
) -> None:
    """Run the planned program on simulated ranks in this process, and compare it with one device:
    loss, every gradient, and the bytes sent. Exit status 1 where they differ."""
    run = run_of(config, mem_coeff).on(devices)
    result = check(run.model(), run.example_batch(), {}, run.plan(devices))
    typer.echo(dumps(asdict(result), indent=1) if json else _check_text(result, devices))
    if not result.passes():
        raise typer.Exit(1)


def _check_text(result: Check, devices: int) -> str:
    loss = "none" if result.loss is None else f"{result.loss:.9g}"
    counted, planned = result.counted_bytes, result.planned_bytes
    return "\n".join(
        [
            f"{devices} simulated ranks against one device, in double precision",
            f"loss on one device       {loss}",
            f"difference of the loss   {result.loss_difference:.1e}",
            f"of the gradients         {result.gradient_difference:.1e} ({result.worst_parameter})",
            f"between the ranks        {result.replica_difference:.1e}",
            f"bytes a device sends     {sum(counted):,} counted, {sum(planned):,} planned",
            "equal" if result.passes() else "NOT equal",
        ]
    )


DIFF_WIDTH = 140
NAMES = 4
"""How many names of operators that differ alike are shown."""


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(help="A saved plan.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    every: Annotated[
        bool, typer.Option("--every", help="Also operators that only follow their neighbors.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Show what two saved plans decide otherwise: cuts, stages, storage, what is computed again,
    and what follows from it. Exit status 1 where they differ."""
    found = differences(Plan.load(first), Plan.load(second), every)
    if json:
        typer.echo(dumps([asdict(each) for each in found], indent=1))
    elif found:
        Console(width=DIFF_WIDTH, highlight=False).print(
            differences_table(found, first.name, second.name)
        )
    else:
        typer.echo("the plans make the same decisions")
    if found:
        raise typer.Exit(1)


def differences_table(found: list[Difference], first: str, second: str) -> Table:
    """A row for each difference."""
    shown = Table()
    shown.add_column("", no_wrap=True)
    for title in (first, second):
        shown.add_column(title, overflow="fold")
    shown.add_column("of", overflow="fold", min_width=60)
    for each in found:
        more = f"\nand {len(each.names) - NAMES} more" if len(each.names) > NAMES else ""
        names = "\n".join(each.names[:NAMES]) + more
        shown.add_row(each.what, each.first, each.second, names)
    return shown

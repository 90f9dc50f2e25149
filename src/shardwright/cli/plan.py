"""The commands about one plan, or two: `plan`, `explain`, `check`, `diff`, `report`."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.api import Check, check
from shardwright.api.save_graphs import SavedGraphs
from shardwright.cli.app import app
from shardwright.cli.options import (
    ClusterOption,
    ConfigArgument,
    DevicesOption,
    LogCostsOption,
    MemCoeffOption,
    MemoryLimitOption,
    ShowProgressOption,
    existing,
    progress,
    report_batch,
    run_of,
)
from shardwright.errors import ConfigError, PlanError
from shardwright.plan import Plan
from shardwright.plan.diff import Difference, differences
from shardwright.plan.table import plan_text
from shardwright.plan.text_columns import text_width

DIFF_WIDTH = 140
NAMES = 4
"""How many names are shown per difference."""

AXIS_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")

EveryOption = Annotated[
    bool, typer.Option("--every", help="Include operators that only follow their neighbors.")
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Print a row for each operator instead of a summary.")
]


@app.command("plan")
def plan_command(
    config: ConfigArgument,
    devices: DevicesOption,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    save_graphs: Annotated[
        Path | None,
        typer.Option(
            help="Save the graph before and after planning, and rank 0's program, to this folder."
        ),
    ] = None,
    mem_coeff: MemCoeffOption = None,
    log_costs: LogCostsOption = False,
    cluster: ClusterOption = None,
    memory_limit: MemoryLimitOption = None,
    full: FullOption = False,
    every: EveryOption = False,
    show_progress: ShowProgressOption = None,
) -> None:
    """Search for a plan and print its summary. Needs no devices and starts no processes."""
    with progress(show_progress) as on_progress:
        run = run_of(
            config,
            mem_coeff,
            log_costs,
            cluster=cluster,
            memory_limit=memory_limit,
            on_progress=on_progress,
        )
        plan = run.plan(devices, SavedGraphs(save_graphs) if save_graphs is not None else None)
        on_progress("memory and table")
        text = plan.to_json(memory=True) if json else plan_text(plan, full, every)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        plan.save(out)
    report_batch(run, config, devices)
    if json or not sys.stdout.isatty():
        typer.echo(text)
    else:
        Console(width=text_width(), highlight=False).print(_colored(text, plan), soft_wrap=True)


def _colored(text: str, plan: Plan) -> Text:
    """The names of axes in a color each, where they stand as axes."""
    colored = Text(text)
    for number, name in enumerate(plan.mesh.alias_names):
        color = AXIS_COLORS[number % len(AXIS_COLORS)]
        colored.highlight_regex(rf"(?:(?<=over )|(?<=[/·])){re.escape(name)}\b", color)
    return colored


@app.command("explain")
def explain_command(
    config: Annotated[
        Path,
        typer.Argument(
            help="A YAML configuration, or a saved plan (.json).",
            show_default=False,
            callback=existing(ConfigError),
        ),
    ],
    name: Annotated[str, typer.Argument(help="An operator of the plan, by its module path.")],
    devices: Annotated[
        int | None, typer.Option(help="Number of devices, for a configuration.", show_default=False)
    ] = None,
    mem_coeff: MemCoeffOption = None,
    log_costs: LogCostsOption = False,
    cluster: ClusterOption = None,
    memory_limit: MemoryLimitOption = None,
) -> None:
    """Explain how one operator is sharded and why: what other choices would cost and what would
    turn the decision, where its inputs come from and what is redistributed."""
    if config.suffix == ".json":
        if log_costs or any(
            each is not None for each in (devices, mem_coeff, cluster, memory_limit)
        ):
            raise typer.BadParameter(f"{config} is a plan, whose options are decided")
        plan = Plan.load(config)
    elif devices is None:
        raise typer.BadParameter("a configuration needs --devices")
    else:
        run = run_of(config, mem_coeff, log_costs, cluster=cluster, memory_limit=memory_limit)
        plan = run.plan(devices)
    typer.echo(plan.explain(name))


@app.command("check")
def check_command(
    config: ConfigArgument,
    devices: DevicesOption,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    mem_coeff: MemCoeffOption = None,
) -> None:
    """Train the planned program on simulated ranks in one process, and compare outputs, gradients,
    and parameters after two steps with the model itself on one device, and the bytes sent with the
    plan. Exit status 1 if they differ."""
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
            f"{devices} simulated ranks vs. one device, float64",
            f"loss on one device    {loss}",
            f"loss difference       {result.loss_difference:.1e}",
            f"gradient difference   {result.gradient_difference:.1e} ({result.worst_parameter})",
            f"after two steps       {result.state_difference:.1e} ({result.worst_state})",
            f"replica difference    {result.replica_difference:.1e}",
            f"bytes per device      {sum(counted):,} counted, {sum(planned):,} planned",
            _verdict(result),
        ]
    )


def _verdict(result: Check) -> str:
    if result.random_operators:
        first, *others = result.random_operators
        drawing = f"{first} and {len(others)} more draw" if others else f"{first} draws"
        equal = "equal on replicas" if result.passes() else "NOT equal"
        return f"{equal}; values not compared, as {drawing} random numbers: set dropout to 0"
    if result.passes():
        return "equal"
    return f"NOT equal, by the {result.cause}" if result.cause else "NOT equal"


@app.command("report")
def report_command(
    plan: Annotated[Path, typer.Argument(help="A saved plan.", callback=existing(PlanError))],
    out: Annotated[
        Path | None, typer.Option(help="The page; by default beside the plan.", show_default=False)
    ] = None,
) -> None:
    """Write a saved plan as a page for a browser: one HTML file that needs no network."""
    saved = Plan.load(plan)
    page = plan.with_suffix(".html") if out is None else out
    page.parent.mkdir(parents=True, exist_ok=True)
    saved.report(page)
    typer.echo(str(page))


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(help="A saved plan.", callback=existing(PlanError))],
    second: Annotated[
        Path, typer.Argument(help="Another saved plan.", callback=existing(PlanError))
    ],
    every: EveryOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Compare two saved plans: cuts, stages, storage, recomputation, and what follows from them.
    Exit status 1 if they differ."""
    changes = differences(Plan.load(first), Plan.load(second), every)
    if json:
        typer.echo(dumps([asdict(change) for change in changes], indent=1))
    elif changes:
        Console(width=DIFF_WIDTH, highlight=False).print(
            differences_table(changes, first.name, second.name)
        )
    else:
        typer.echo("the plans make the same decisions")
    if changes:
        raise typer.Exit(1)


def differences_table(changes: list[Difference], first: str, second: str) -> Table:
    """A row for each difference; `first` and `second` are the columns' titles."""
    table = Table()
    table.add_column("", no_wrap=True)
    for title in (first, second):
        table.add_column(title, overflow="fold")
    table.add_column("operators or parameters", overflow="fold", min_width=60)
    for change in changes:
        more = f"\nand {len(change.names) - NAMES} more" if len(change.names) > NAMES else ""
        names = "\n".join(change.names[:NAMES]) + more
        table.add_row(change.what, change.first, change.second, names)
    return table

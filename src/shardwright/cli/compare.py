"""`shardwright compare`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from shardwright.cli.app import app
from shardwright.cli.options import ShowProgressOption, progress
from shardwright.compare import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    GRID,
    TENSOR_PARALLEL,
    Alternative,
    Comparison,
    RealComparison,
    alternative_name,
    compare_measured,
)
from shardwright.compare import compare_predicted as compared
from shardwright.compare.measured import ROUNDS
from shardwright.cost.memory import binary
from shardwright.progress import within
from shardwright.train.launch import LogFolder

WIDTH, CLUSTER, PROCESSES = 140, "ascend910b", 8


@app.command("compare")
def compare_command(
    configs: Annotated[
        list[Path], typer.Argument(help="Experts' configurations, such as configs/*_expert.yaml.")
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            help=f"Devices and links: a name, or a YAML file; by default {CLUSTER}, with --run this"
            " machine, measured anew."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Number of devices; by default the configuration's, with --run"
            f" {PROCESSES} processes."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    show_progress: ShowProgressOption = None,
    run: Annotated[
        Literal["tiny"] | None,
        typer.Option(help="Really run training steps of the tiny variants on local processes."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="With --run: steps of each way.")] = ROUNDS,
    log_dir: Annotated[Path, typer.Option(help="With --run: folder of the ranks' logs.")] = Path(
        "log_output"
    ),
) -> None:
    """Compare the automatic plan with what experts configure by hand and with all ways of data x
    tensor x pipeline parallel, by the predicted time of a step. Exit status 1 where another way
    that fits into memory is faster."""
    if run is not None:
        logs, processes = LogFolder(log_dir), devices or PROCESSES
        with progress(show_progress) as told:
            real = compare_measured(
                configs,
                logs,
                devices=processes,
                rounds=rounds,
                cluster=cluster,
                on_progress=told,
            )
        _show_real(real, json)
        return
    with progress(show_progress) as told:
        found = [
            compared(
                config, cluster or CLUSTER, devices, within(told, config.stem, done, len(configs))
            )
            for done, config in enumerate(configs)
        ]
    if json:
        data = [{**asdict(each), "speed_up": each.speed_up} for each in found]
        typer.echo(dumps(data, indent=1))
    else:
        console = Console(width=WIDTH)
        console.print(comparison_table(found))
        for each in found:
            if each.too_large:
                console.print(refused(each), highlight=False, soft_wrap=True)
    if not all(each.holds for each in found):
        raise typer.Exit(1)


def _show_real(found: list[RealComparison], json: bool) -> None:
    if json:
        data = [{**asdict(each), "spearman": each.correlation} for each in found]
        typer.echo(dumps(data, indent=1))
        return
    console = Console(width=WIDTH)
    for each in found:
        console.print(real_table(each))


def real_table(found: RealComparison) -> Table:
    """A row for each way that was run."""
    shown = Table(
        title=f"{found.model}: a step of {found.batch} x {found.seq_length} tokens on"
        f" {found.processes} processes; Spearman's ρ of predicted and measured"
        f" {found.correlation:.2f}",
        title_justify="left",
    )
    shown.add_column("data · tensor · pipeline parallel", overflow="fold")
    for name in ("predicted, ms", "measured, ms (quartiles)", "SpeedUp (quartiles)"):
        shown.add_column(name, justify="right")
    for run in found.runs:
        low, _, high = quantiles(run.seconds, n=4)
        slower, middle, faster = found.speed_ups(run)
        shown.add_row(
            "\n".join(run.ways),
            f"{1e3 * run.predicted:.1f}",
            f"{1e3 * run.median:.1f} ({1e3 * low:.1f}–{1e3 * high:.1f})",
            f"{middle:.0%} ({slower:.0%}–{faster:.0%})",
        )
    return shown


TITLE = "Thousand tokens a second, memory of a device, and what it sends in a step"


def comparison_table(found: list[Comparison]) -> Table:
    """A row for each model: its ways, and the speed-up of the automatic plan over the expert's."""
    shown = Table(title=TITLE, title_justify="left")
    shown.add_column("model")
    shown.add_column("devices", justify="right")
    shown.add_column("batch", justify="right")
    for kind in (EXPERT, DATA_PARALLEL, TENSOR_PARALLEL, GRID, AUTO):
        shown.add_column(kind, justify="right")
    shown.add_column("SpeedUp", justify="right")
    for each in found:
        ways = [each.way(k) for k in (EXPERT, DATA_PARALLEL, TENSOR_PARALLEL, GRID, AUTO)]
        shown.add_row(
            each.model,
            str(each.devices),
            str(each.global_batch),
            *map(_cell, ways),
            f"{each.speed_up:.1%}",
        )
    return shown


def refused(found: Comparison) -> str:
    """Which ways do not fit, and by how much."""
    assert found.limit is not None
    ways = ", ".join(
        f"{alternative_name(way.kind, way.parts)} ({binary(way.memory)})" for way in found.too_large
    )
    return f"{found.model}: too large for {binary(found.limit)}, so not counted: {ways}"


def _cell(way: Alternative | None) -> str:
    if way is None:
        return "-"
    parts = "" if way.parts is None else f" {'·'.join(map(str, way.parts))}"
    over = "" if way.fits else " too large"
    speed = f"{way.tokens_per_second / 1e3:.1f}{parts}"
    return f"{speed}\n{binary(way.memory)}{over}\nsends {binary(way.bytes)}"

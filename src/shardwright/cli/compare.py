"""`shardwright compare`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardwright.cli.app import app
from shardwright.cli.progress import ShowProgress, progress
from shardwright.compare import AUTO, DATA_PARALLEL, EXPERT, GRID, TENSOR_PARALLEL, Comparison, Way
from shardwright.compare import compare as compared
from shardwright.cost.memory import binary
from shardwright.progress import within

WIDTH = 140


@app.command()
def compare(
    configs: Annotated[
        list[Path], typer.Argument(help="Experts' configurations, such as configs/*_expert.yaml.")
    ],
    cluster: Annotated[
        str, typer.Option(help="Devices and links: a name, or a YAML file.")
    ] = "ascend910b",
    devices: Annotated[
        int | None, typer.Option(help="Number of devices; by default the configuration's.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    show_progress: ShowProgress = None,
) -> None:
    """Compare the automatic plan with what experts configure by hand and with all ways of data x
    tensor x pipeline parallel, by the predicted time of a step. Exit status 1 where another way
    that fits into memory is faster."""
    with progress(show_progress) as told:
        found = [
            compared(config, cluster, devices, within(told, config.stem, done, len(configs)))
            for done, config in enumerate(configs)
        ]
    if json:
        data = [{**asdict(each), "speed_up": each.speed_up} for each in found]
        typer.echo(dumps(data, indent=1))
    else:
        console = Console(width=WIDTH)
        console.print(table(found))
        for each in found:
            if each.too_large:
                console.print(refused(each), highlight=False, soft_wrap=True)
    if not all(each.holds for each in found):
        raise typer.Exit(1)


def table(found: list[Comparison]) -> Table:
    """A row for each model: its ways, and the speed-up of the automatic plan over the expert's."""
    shown = Table(title="Thousand tokens a second (memory of a device)", title_justify="left")
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
    ways = ", ".join(f"{_name(way)} ({binary(way.memory)})" for way in found.too_large)
    return f"{found.model}: too large for {binary(found.limit)}, so not counted: {ways}"


def _name(way: Way) -> str:
    return way.kind if way.parts is None else f"{way.kind} {'·'.join(map(str, way.parts))}"


def _cell(way: Way | None) -> str:
    if way is None:
        return "-"
    parts = "" if way.parts is None else f" {'·'.join(map(str, way.parts))}"
    over = "" if way.fits else " too large"
    return f"{way.tokens_per_second / 1e3:.1f}{parts}\n({binary(way.memory)}{over})"

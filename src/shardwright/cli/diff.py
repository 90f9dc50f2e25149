"""`shardwright diff`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardwright.cli.app import app
from shardwright.plan import Plan
from shardwright.plan.difference import Difference, differences

WIDTH = 140
NAMES = 4
"""How many names of operators that differ alike are shown."""


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A saved plan.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    every: Annotated[
        bool, typer.Option("--every", help="Also operators that only follow their neighbours.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Show what two saved plans decide otherwise: cuts, stages, storage, what is computed again,
    and what follows from it. Exit status 1 where they differ."""
    found = differences(Plan.load(first), Plan.load(second), every)
    if json:
        typer.echo(dumps([asdict(each) for each in found], indent=1))
    elif found:
        Console(width=WIDTH, highlight=False).print(table(found, first.name, second.name))
    else:
        typer.echo("the plans decide the same")
    if found:
        raise typer.Exit(1)


def table(found: list[Difference], first: str, second: str) -> Table:
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

"""`shardwright calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwright.cli.app import app
from shardwright.cost.cluster import written
from shardwright.cost.local import cache_file, calibrate


@app.command("calibrate")
def calibrate_command(
    devices: Annotated[
        int, typer.Option(min=2, help="Processes between which links are measured.")
    ] = 2,
) -> None:
    """Measure this machine's CPU and the links between processes, for the cluster `local`; the
    figures are kept in the user's cache."""
    cluster = calibrate(devices)
    typer.echo(written(cluster).rstrip())
    typer.echo(f"# kept in {cache_file()}")

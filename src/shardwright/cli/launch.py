"""`shardwright launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.app import app
from shardwright.cli.options import Devices
from shardwright.train.launch import LogFolder, launch


@app.command(
    "launch", context_settings={"allow_extra_args": True, "allow_interspersed_args": False}
)
def launch_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script.", exists=True, dir_okay=False)],
    devices: Devices,
    log_dir: Annotated[Path, typer.Option(help="Folder of the ranks' logs.")] = Path("log_output"),
) -> None:
    """Run a script as local processes, one a device, with the environment that torchrun would give
    them. Rank N writes to LOG_DIR/1/rank.N/stdout and stderr; what follows SCRIPT are its own
    arguments."""
    logs = LogFolder(log_dir)
    logs.clear(num_ranks=devices)
    launch([str(script), *context.args], devices, logs)

"""`shardwright launch`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from shardwright.cli.app import app
from shardwright.cli.options import DevicesOption
from shardwright.cost.calibrate import cache_file, calibrate
from shardwright.cost.cluster import cluster_to_yaml
from shardwright.models import MODELS, build
from shardwright.train.launch import LogFolder, launch


@app.command(
    "launch", context_settings={"allow_extra_args": True, "allow_interspersed_args": False}
)
def launch_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script.", exists=True, dir_okay=False)],
    devices: DevicesOption,
    log_dir: Annotated[Path, typer.Option(help="Folder of the ranks' logs.")] = Path("log_output"),
) -> None:
    """Run a script as local processes, one a device, with the environment that torchrun would give
    them. Rank N writes to LOG_DIR/1/rank.N/stdout and stderr; what follows SCRIPT are its own
    arguments."""
    logs = LogFolder(log_dir)
    logs.clear(num_ranks=devices)
    launch([str(script), *context.args], devices, logs)


@app.command("calibrate")
def calibrate_command(
    devices: Annotated[
        int, typer.Option(min=2, help="Processes between which links are measured.")
    ] = 2,
) -> None:
    """Measure this machine's CPU and the links between processes, for the cluster `local`; the
    figures are kept in the user's cache."""
    cluster = calibrate(devices)
    typer.echo(cluster_to_yaml(cluster).rstrip())
    typer.echo(f"# kept in {cache_file()}")


WIDTH = 140
COLUMNS = {
    "num_layers": "blocks",
    "hidden_size": "width",
    "num_heads": "heads",
    "num_kv_heads": "of keys",
    "intermediate_size": "feed-forward",
    "vocab_size": "vocabulary",
    "seq_length": "positions",
    "positions": "their kind",
}


@app.command("models")
def models_command(
    tiny: Annotated[bool, typer.Option("--tiny", help="Those that are small, for tests.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the language models that a configuration can name, with their sizes."""
    names = [name for name in MODELS if name.endswith("_tiny") == tiny]
    counts = {name: parameter_count(name) for name in names}
    if json:
        found = [
            {"name": name, "parameters": counts[name], **asdict(MODELS[name])} for name in names
        ]
        typer.echo(dumps(found, indent=1))
        return
    shown = Table()
    shown.add_column("model.name")
    for title in ("parameters", *COLUMNS.values()):
        shown.add_column(title, justify="right")
    for name in names:
        sizes = (str(getattr(MODELS[name], key)) for key in COLUMNS)
        shown.add_row(name, f"{counts[name]:,}", *sizes)
    Console(width=WIDTH, highlight=False).print(shown)
    if not tiny:
        typer.echo("each also small enough for tests, with _tiny appended: --tiny")


def parameter_count(name: str) -> int:
    """How many numbers the parameters of the model of this name are; none is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name).parameters())

"""`shardwright models`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from shardwright.cli.app import app
from shardwright.models import MODELS, build

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


@app.command()
def models(
    tiny: Annotated[bool, typer.Option("--tiny", help="Those that are small, for tests.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the language models that a configuration can name, with their sizes."""
    names = [name for name in MODELS if name.endswith("_tiny") == tiny]
    counts = {name: parameters(name) for name in names}
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


def parameters(name: str) -> int:
    """How many numbers the parameters of the model of this name are; none is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name).parameters())

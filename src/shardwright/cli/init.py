"""The command `init`: the configurations that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import shardwright
from shardwright.cli.app import app
from shardwright.errors import ConfigError

PACKAGE = Path(shardwright.__file__).parent


def configurations() -> dict[str, Path]:
    """The file of each name, such as `llama2_7b_auto` and `tiny/llama2_7b`: a wheel holds them in
    the package, a checkout at its root."""
    places = (PACKAGE / "configs", PACKAGE.parents[1] / "configs")
    folder = next((place for place in places if place.is_dir()), places[0])
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


@app.command("init")
def init_command(
    name: Annotated[
        str | None, typer.Argument(help="One of the listed names.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default NAME.yaml.")
    ] = None,
) -> None:
    """Copy a configuration to start from; without a name, list what there is."""
    files = configurations()
    if name is None:
        if out is not None:
            raise typer.BadParameter("--out needs a name")
        for each in files:
            typer.echo(each)
        return
    file = files.get(name)
    if file is None:
        similar = [each for each in files if name in each] or list(files)
        raise ConfigError(f"no configuration is named {name}; there are {', '.join(similar)}")
    target = out or Path(file.name)
    try:
        with target.open("xb") as stream:
            stream.write(file.read_bytes())
    except FileExistsError:
        raise ConfigError(f"{target} exists already: choose another file by --out") from None
    typer.echo(f"written to {target}")

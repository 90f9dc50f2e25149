"""The command `init`: the configurations and examples that come with the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

import shardwright
from shardwright.cli.app import app
from shardwright.errors import ConfigError

PACKAGE = Path(shardwright.__file__).parent


def files() -> dict[str, Path]:
    """The file of each name, such as `tiny/llama2_7b` and `examples/demo.py`: a wheel holds them in
    the package, a checkout at its root."""
    root = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parents[1]
    configs, examples = root / "configs", root / "examples"
    named = {
        file.relative_to(configs).with_suffix("").as_posix(): file
        for file in sorted(configs.rglob("*.yaml"))
    }
    copied = (file for file in sorted(examples.iterdir()) if file.is_file())
    return named | {f"{examples.name}/{file.name}": file for file in copied}


def starter(family: str, known: dict[str, Path]) -> str | None:
    """Of a family, such as `llama` or `qwen`, the configuration that any machine can train."""
    tiny = (each for each in known if re.fullmatch(rf"tiny/{re.escape(family)}\d*_.*", each))
    return min(tiny, key=lambda each: (len(each), each), default=None)


@app.command("init")
def init_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One of the listed names, or a family, such as llama: a configuration of it that "
            "trains on any machine.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default in the working folder.")
    ] = None,
) -> None:
    """Copy a configuration or an example to start from; without a name, list what there is."""
    known = files()
    if name is None:
        if out is not None:
            raise typer.BadParameter("--out needs a name")
        for each in known:
            typer.echo(each)
        return
    file = known.get(starter(name, known) or name)
    if file is None:
        similar = [each for each in known if name in each] or list(known)
        raise ConfigError(
            f"no configuration or example is named {name}; there are {', '.join(similar)}"
        )
    target = out or Path(file.name)
    try:
        with target.open("xb") as stream:
            stream.write(file.read_bytes())
    except FileExistsError:
        raise ConfigError(f"{target} exists already: choose another file by --out") from None
    typer.echo(f"written to {target}")

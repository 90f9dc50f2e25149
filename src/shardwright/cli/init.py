"""The command `init`, which copies a packaged configuration or example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

import shardwright
from shardwright.cli.app import app, echo
from shardwright.core.plan.text_columns import GAP, MIN_WIDTH, wrap_sentence
from shardwright.errors import ConfigError

PACKAGE = Path(shardwright.__file__).parent


def available_files() -> dict[str, Path]:
    """Return configurations and examples by name: `tiny/llama2_7b`, `examples/demo.py`, …."""
    # A wheel has the folders inside the package, a checkout at its root.
    root = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parents[1]
    configs, examples = root / "configs", root / "examples"
    configs_by_name = {
        file.relative_to(configs).with_suffix("").as_posix(): file
        for file in sorted(configs.rglob("*.yaml"))
    }
    example_files = (file for file in sorted(examples.iterdir()) if file.is_file())
    return configs_by_name | {f"{examples.name}/{file.name}": file for file in example_files}


def tiny_config_of_family(family: str, names: Mapping[str, Path]) -> str | None:
    """Return the name of a model family's tiny configuration; None without such a file.

    Args:
        family: a model family, such as `llama`.
        names: available files by name.
    """
    # The shortest name is the plain configuration, without a suffix such as `_expert`.
    tiny = (each for each in names if re.fullmatch(rf"tiny/{re.escape(family)}\d*_.*", each))
    # The name as second key, so that the choice does not depend on the order of files.
    return min(tiny, key=lambda each: (len(each), each), default=None)


def first_line(file: Path) -> str:
    """Return the first line of the comment, docstring or heading at the top of a file."""
    content = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        content = "".join(json.loads(content)["cells"][0]["source"])
    # A shebang describes nothing.
    lines = (line.strip('#" ') for line in content.splitlines() if not line.startswith("#!"))
    return next(filter(None, lines), "").rstrip(".")


def listing_lines(files: Mapping[str, Path]) -> Iterator[str]:
    """Yield lines of at most 80 columns with each file's name and description.

    Args:
        files: files by name, configurations before examples.
    """
    for _, group in groupby(files, lambda name: name.startswith("examples/")):
        names = list(group)
        width = max(map(len, names))
        for name in names:
            yield from wrap_sentence(first_line(files[name]), MIN_WIDTH, f"{name:{width}}{GAP}")


@app.command("init")
def init_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A listed name, or a model family such as llama for a configuration of it that"
            " trains on any machine.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default in the working folder.")
    ] = None,
) -> None:
    """Copy a configuration or an example to start from.

    Without a name, lists all configurations and examples with descriptions.
    """
    files = available_files()
    if name is None:
        if out is not None:
            raise typer.BadParameter(
                "--out needs the NAME of a configuration\nexample: shardwright init llama --out "
                "my.yaml"
            )
        for line in listing_lines(files):
            echo(line)
        return
    file = files.get(tiny_config_of_family(name, files) or name)
    if file is None:
        similar = ", ".join(each for each in files if name in each)
        remedy = f"similar names: {similar}" if similar else "list all names: shardwright init"
        raise ConfigError(f"no configuration or example is named {name!r}\n{remedy}")
    target = out or Path(file.name)
    try:
        # Mode x fails if the file exists, so that an edited configuration is never overwritten.
        stream = target.open("xb")
    except FileExistsError:
        raise ConfigError(f"{target} already exists\nchoose another file with --out") from None
    try:
        with stream:
            stream.write(file.read_bytes())
    except OSError as error:
        # An incomplete file would be in the way of the next attempt.
        target.unlink(missing_ok=True)
        error.filename = str(target)
        raise
    echo(f"written to {target}")

"""`python -m shardwright` is the command `shardwright`."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer


def run_command() -> None:
    """The entry point. What lists the commands reads it from their source, for to import them, and
    torch with them, takes seconds."""
    arguments = sys.argv[1:]
    if arguments in ([], ["--help"]):
        listing()()
    import_module("shardwright.cli").main()


def listing() -> typer.Typer:
    """An application that has only the help of each command."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)
    for file in sorted(Path(__file__).with_name("cli").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            match node:
                case ast.FunctionDef(
                    decorator_list=[
                        ast.Call(
                            func=ast.Attribute(value=ast.Name("app"), attr="command"),
                            args=[ast.Constant(str(name))],
                        )
                    ]
                ):
                    app.command(name, help=ast.get_docstring(node))(_command)
    app.callback()(_application)
    return app


def _command() -> None: ...


def _application(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions of Shardwright, torch and Python, and exit."
        ),
    ] = False,
) -> None:
    """Plan how every operator of a PyTorch model is sharded over N devices, and train it."""


if __name__ == "__main__":
    run_command()

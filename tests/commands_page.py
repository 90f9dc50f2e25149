"""The page of all commands with their options, as the command line describes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from shardwright.cli import app

INTRODUCTION = """\
# Commands

All commands with their options, in the order in which a new user needs them.
`shardwright COMMAND --help` prints the same options. For an invalid input or file, a command prints
the problem and a remedy to stderr, and exits with status 2. `shardwright --version` prints the
versions of Shardwright, torch and Python.
"""


def commands_page() -> str:
    """The page in Markdown: a section for each command, in the order of the help."""
    group: Any = typer.main.get_command(app)
    sections = (_section(name, group.commands[name]) for name in group.list_commands(None))
    return INTRODUCTION + "".join("\n" + "\n".join(section) + "\n" for section in sections)


def _section(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n")) + "\n"
    yield f"| `shardwright {name}` | |"
    yield "|---|---|"
    for each in command.params:
        yield f"| {_words(each)} | {_meaning(each)} |"


def _words(parameter: Any) -> str:
    """`NAME` or `--option VALUE`."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`" + " …" * (parameter.nargs == -1)
    names = "`, `".join((*parameter.opts, *parameter.secondary_opts))
    if getattr(parameter, "is_flag", False):
        return f"`{names}`"
    value = parameter.metavar or parameter.opts[0].removeprefix("--").upper()
    return f"`{names} {value}`".replace("|", "\\|")


def _meaning(parameter: Any) -> str:
    text = re.sub(r"\s+", " ", parameter.help or "").replace("|", "\\|")
    notes = [] if not parameter.required else ["required"]
    default = getattr(parameter.default, "value", parameter.default)
    if default not in (None, False, ()) and parameter.show_default:
        notes.append(f"default: `{default}`")
    return " ".join([text, *(f"({note})" for note in notes)]).strip()

"""The Typer application and the entry point of the command line."""

from __future__ import annotations

import errno
import logging
import platform
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwright import __version__, errors
from shardwright.core.torch_internals.modules import log_only
from shardwright.errors import ShardwrightError
from shardwright.run.launch.rank_failure import RankFailedError, StoppedError

USER_PATH = (
    *("init", "plan", "report", "check", "train"),
    *("explain", "diff", "rehearse", "tune", "compare"),
    *("models", "calibrate", "launch"),
)
"""The order of the commands in the help: that in which a new user meets them."""


class OrderedCommands(TyperGroup):
    """A group that lists its commands in the order of `USER_PATH`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*USER_PATH, *(name for name in self.commands if name not in USER_PATH)]


# Without rich, help is at most 80 columns wide, and descriptions get most of them: rich gives each
# of the option, its negation and its type a column as wide as its longest cell.
app = typer.Typer(
    cls=OrderedCommands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        python = platform.python_version()
        typer.echo(f"shardwright {__version__} (torch {version('torch')}, Python {python})")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the versions of Shardwright, torch and Python, and exit.",
    ),
]


@app.callback()
def shardwright(show_version: VersionOption = False) -> None:
    """Plan how every operator of a PyTorch model is sharded over N devices, and train it."""


def main() -> None:
    """Runs a command and exits.

    The exit status is 2 with the message for an invalid input or file, 1 with the failed rank's
    traceback for an error in the model, and 128 + N after signal N.
    """
    # A failed capture repeats torch's warnings in its error; a successful one does not need them.
    log_only(logging.ERROR)
    try:
        app()
    except ShardwrightError as error:
        _fail(str(error), 2)
    except RankFailedError as error:
        # A rank may find an invalid input that this process could not detect. Its message has both
        # lines, as if the error had been raised here.
        if issubclass(getattr(errors, error.exception_type, Exception), ShardwrightError):
            _fail(error.text, 2)
        _fail(str(error), 1)
    except OSError as error:
        # Only errors of a path, and a full disk, are the user's; others need their traceback.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _fail(": ".join(str(part) for part in (error.filename, error.strerror) if part), 2)
    except StoppedError as error:
        _fail(str(error), 128 + error.number)


def _fail(message: str, status: int) -> None:
    """Prints a message, with its remedy indented, and exits."""
    text = message.replace("\n", "\n  ") if status == 2 else message
    typer.echo(f"error: {text}", err=True)
    raise SystemExit(status)

"""The application that the commands belong to, and its entry point."""

from __future__ import annotations

import errno
import logging
import platform
from importlib.metadata import version
from typing import Annotated

import typer

from shardwright import __version__, errors
from shardwright.core.torch_internals.modules import log_only
from shardwright.errors import ShardwrightError
from shardwright.run.launch.rank_failure import RankFailedError, StoppedError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


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
    """The entry point. Exits with status 2 and one line for an invalid input or file, with 1 and
    the failed rank's traceback for an error in the model, with 128 + the number of the signal that
    stopped it."""
    # What torch warns about during capture is part of the error, if there is one.
    log_only(logging.ERROR)
    try:
        app()
    except ShardwrightError as error:
        _fail(str(error), 2)
    except RankFailedError as error:
        # A rank may find an invalid input that this process could not detect.
        if issubclass(getattr(errors, error.kind, Exception), ShardwrightError):
            _fail(error.text, 2)
        _fail(str(error), 1)
    except OSError as error:
        # A folder that cannot be made, a full disk: others are no mistakes of the user's.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _fail(": ".join(str(part) for part in (error.filename, error.strerror) if part), 2)
    except StoppedError as error:
        _fail(str(error), 128 + error.number)


def _fail(message: str, status: int) -> None:
    for line in message.splitlines() if status == 2 else [message]:
        typer.echo(f"error: {line}", err=True)
    raise SystemExit(status)

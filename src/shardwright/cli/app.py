"""The Typer application and the entry point of the command line."""

from __future__ import annotations

import io
import logging
import platform
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwright import __version__, errors
from shardwright.core.torch_internals.modules import set_log_level
from shardwright.errors import (
    ShardwrightError,
    ShardwrightWarning,
    one_line,
    printable,
    system_remedy,
)
from shardwright.run.launch.rank_failure import RankFailedError, StoppedError

USER_PATH = (
    *("init", "plan", "report", "check", "train"),
    *("explain", "diff", "rehearse", "tune", "compare"),
    *("models", "calibrate", "launch"),
)
"""Order of the commands in the help: the order in which a new user needs them."""


class OrderedCommands(TyperGroup):
    """Command group whose help lists commands in the order of `USER_PATH`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*USER_PATH, *(name for name in self.commands if name not in USER_PATH)]


# Without rich, help is at most 80 columns wide, and descriptions get most of them. Rich would give
# the option, its negation and its type a column each, as wide as its longest cell.
app = typer.Typer(
    cls=OrderedCommands,
    add_completion=False,
    no_args_is_help=True,
    # `main` prints all errors itself.
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def echo(text: str, err: bool = False) -> None:
    """Print text with escaped control characters, which names in plans and other files may have.

    All commands print by this function, or by a `PrintableConsole`.

    Args:
        err: print to stderr.
    """
    try:
        typer.echo(printable(text), err=err)
    except OSError as error:
        # Such as a full disk to which stdout is redirected.
        error.filename = "stderr" if err else "stdout"
        raise


def _print_version(requested: bool) -> None:
    if requested:
        python = platform.python_version()
        echo(f"shardwright {__version__} (torch {version('torch')}, Python {python})")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_print_version,
        # Handled before other arguments are checked.
        is_eager=True,
        help="Print the versions of Shardwright, torch and Python, and exit.",
    ),
]


@app.callback()
def shardwright(show_version: VersionOption = False) -> None:
    """Plan how every operator of a PyTorch model is sharded over N devices, and train it."""


def main() -> None:
    """Run a command and exit.

    The exit status is 2 for an invalid input or file, 1 for an error in the model, and 128 + N
    after signal N. Prints the message for status 2, the failed rank's traceback for status 1.
    """
    # Warnings of torch while it captures: the error of a failed capture repeats them, and after a
    # successful capture they do not matter.
    set_log_level(logging.ERROR)
    try:
        with _escape_control_characters():
            # In standalone mode, Click would print errors itself, and exit.
            status = app(standalone_mode=False)
        # Without that mode, `typer.Exit` is returned as its status.
        raise SystemExit(status if isinstance(status, int) else 0)
    except _USAGE_ERROR as error:
        _exit_with_usage_error(error)
    except typer.Abort:
        echo("Aborted.", err=True)
        raise SystemExit(1) from None
    except ShardwrightError as error:
        _exit_with_error(str(error), 2)
    except RankFailedError as error:
        # A rank may find an invalid input that this process could not detect. Its message is
        # printed as if the error had been raised here.
        # The name may be of a class of any library.
        if issubclass(getattr(errors, error.exception_type, Exception), ShardwrightError):
            _exit_with_error(error.exception_message, 2)
        _exit_with_error(str(error), 1)
    except OSError as error:
        # The user can fix errors with a path, and limits of the system, such as a full disk; other
        # errors need a traceback.
        remedy = system_remedy(error)
        if error.filename is None and not remedy:
            raise
        problem = ": ".join(str(detail) for detail in (error.filename, error.strerror) if detail)
        # With the limited text of an error of this package: a path may have thousands of letters.
        _exit_with_error(str(ShardwrightError(f"{problem}\n{remedy}" if remedy else problem)), 2)
    except StoppedError as error:
        _exit_with_error(str(error), 128 + error.signal_number)
    except Exception as error:
        if _is_out_of_memory(error):
            _exit_with_error(
                f"memory ran out: {one_line(error) or type(error).__name__}\n"
                "use a smaller model or batch, or more devices: `shardwright plan` predicts what"
                " each needs",
                2,
            )
        # A traceback may have control characters, which Python's own hook would print.
        sys.excepthook = _print_traceback
        raise


def _is_out_of_memory(error: Exception) -> bool:
    # PyTorch's allocator for CPUs raises a RuntimeError.
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


# Typer has a copy of Click, or uses Click, depending on its version.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _exit_with_usage_error(error: Any) -> None:
    """Print the usage of a command and the error, and exit with the status of the error."""
    usage = io.StringIO()
    error.show(usage)
    echo(usage.getvalue().rstrip("\n"), err=True)
    raise SystemExit(error.exit_code)


def _print_traceback(*error: Any) -> None:
    echo("".join(traceback.format_exception(*error)).rstrip("\n"), err=True)


@contextmanager
def _escape_control_characters() -> Iterator[None]:
    """Context in which warnings and log messages are printed with escaped control characters."""
    format_warning, handler = warnings.formatwarning, logging.lastResort

    def format_printable(message: Any, category: Any, *where: Any, **options: Any) -> str:
        # Warnings of this package are for users, whom Python's file and line would not help.
        if issubclass(category, ShardwrightWarning):
            indented = str(message).replace("\n", "\n  ")
            return printable(f"warning: {indented}\n")
        return printable(format_warning(message, category, *where, **options))

    formatter = handler.formatter if handler is not None else None
    warnings.formatwarning = format_printable
    if handler is not None:
        handler.setFormatter(_PrintableFormatter())
    try:
        yield
    finally:
        warnings.formatwarning = format_warning
        if handler is not None:
            handler.setFormatter(formatter)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _exit_with_error(message: str, status: int) -> None:
    """Print `message`, with its remedy indented, and exit with `status`."""
    # Only errors of inputs, of status 2, have a remedy in their second line.
    indented = message.replace("\n", "\n  ") if status == 2 else message
    echo(f"error: {indented}", err=True)
    raise SystemExit(status)

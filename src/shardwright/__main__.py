"""Run the command `shardwright`, also as `python -m shardwright`."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType

from shardwright.errors import ConfigError, ShardwrightError, printable
from shardwright.plain_data import parse_yaml
from shardwright.text_files import read_text

PACKAGE = Path(__file__).parent

LIGHT_MODULES = ("cli", "errors", "text_files", "progress", "core.plan.text_columns")
"""Modules and subpackages that `--help` and `init` import; all others are imported only when
another command runs."""

CONFIG_COMMANDS = ("plan", "report", "check", "train", "explain", "rehearse", "tune")
"""Commands that take a configuration."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C."""

INVALID_INPUT = 2
"""Exit status for an invalid file."""

LOADING_NOTE = "loading torch"


def run_command() -> None:
    """Run the command line.

    Prints help, and runs `init`, without importing torch, which takes seconds. On a terminal or
    with `--progress`, prints a note before importing torch for any other command. Ctrl-C ends the
    process with status 130.
    """
    _make_standard_streams_usable()
    # A traceback through an import would help nobody, and some imports swallow KeyboardInterrupt.
    handles_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupt:
        signal.signal(signal.SIGINT, _exit_on_interrupt)
    problem = _make_working_folder_message() or _make_unknown_keys_message(sys.argv[1:])
    if problem:
        message = f"error: {problem}\n".replace("\n", "\n  ").rstrip()
        sys.stderr.write(f"{printable(message)}\n")
        sys.exit(INVALID_INPUT)
    main = _import_cli_main(sys.argv[1:])
    try:
        if handles_interrupt:
            # The imports are over: from here on Ctrl-C raises KeyboardInterrupt, which commands may
            # handle.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _make_standard_streams_usable() -> None:
    """Replace closed standard streams by the null device, and escape what an encoding lacks."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            # Else the next file to be opened, such as a checkpoint, would get this descriptor, and
            # what C++ libraries print would be written into it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As Python does for stderr: with `PYTHONIOENCODING=ascii` arrows would raise an error.
        sys.stdout.reconfigure(errors="backslashreplace")


def _make_working_folder_message() -> str:
    """Return an error message if the working folder was deleted, which torch cannot be imported
    in; empty otherwise."""
    try:
        os.getcwd()  # noqa: PTH109  (`Path.cwd` is the same call)
    except OSError as error:
        return (
            f"the working folder cannot be used: {error.strerror}\n"
            "it may have been deleted or replaced: change to it again with `cd`"
        )
    return ""


def _make_unknown_keys_message(arguments: Sequence[str]) -> str:
    """Return an error message with the unknown keys in the configuration files among the arguments;
    empty if all keys are known. The command reports other mistakes, after importing torch."""
    messages = []
    # A pipe can be read only once, by the command.
    for file in filter(Path.is_file, _iterate_config_files(arguments)):
        # Files that do not exist or are invalid YAML are reported by the command.
        with suppress(OSError, ValueError, ShardwrightError):
            content = parse_yaml(read_text(file, ConfigError), str(file), ConfigError)
            messages.append(_load_known_keys_module().unknown_keys(content, str(file)))
    return "\n".join(filter(None, messages))


def _iterate_config_files(arguments: Sequence[str]) -> Iterator[Path]:
    """Yield the YAML files among the arguments, except values of options."""
    if not arguments or arguments[0] not in CONFIG_COMMANDS:
        return
    # The value of an option stands after the option.
    for before, argument in pairwise(arguments):
        if argument.endswith((".yaml", ".yml")) and not before.startswith("-"):
            yield Path(argument)


def _load_known_keys_module() -> ModuleType:
    """Load the module `known_keys` without its package, which imports torch."""
    spec = spec_from_file_location("known_keys", PACKAGE / "run" / "config" / "known_keys.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _exit_on_interrupt(number: int, frame: FrameType | None) -> None:
    # Not `sys.exit`, whose exception an import may swallow too.
    os._exit(INTERRUPTED)


def _import_cli_main(arguments: Sequence[str]) -> Callable[[], None]:
    """Import the command line, with a note if this takes seconds, and return its entry point."""
    note = ""
    if _runs_without_torch(arguments):
        # First, so that torch is not found although it is installed.
        sys.meta_path.insert(0, PlaceholderModules())
    elif "--no-progress" in arguments:
        pass
    elif sys.stderr.isatty():
        note = f"{LOADING_NOTE}\r"
    elif "--progress" in arguments:
        # In the format of the progress lines that follow, whose seconds count from now.
        note = f"{0:6.1f} s  {LOADING_NOTE}\n"
    # On a full disk, writing even an empty text is an error.
    if note:
        sys.stderr.write(note)
        sys.stderr.flush()
    main: Callable[[], None] = import_module("shardwright.cli").main
    if note.endswith("\r"):
        # Overwrites the note.
        sys.stderr.write(f"{' ' * len(LOADING_NOTE)}\r")
    return main


def _runs_without_torch(arguments: Sequence[str]) -> bool:
    if not arguments or arguments[0] == "init" or arguments == ["--version"]:
        return True
    # `--help`, or the help of one command.
    return arguments[-1] == "--help" and len(arguments) <= 2


class PlaceholderModules(MetaPathFinder, Loader):
    """Import hook that replaces torch, and all modules but `LIGHT_MODULES`, by placeholders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, subpath = fullname.partition(".")
        is_light = any(f"{subpath}.".startswith(f"{light}.") for light in LIGHT_MODULES)
        if package != "torch" and (package != "shardwright" or is_light):
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        # Light modules are found inside of empty packages.
        spec.submodule_search_locations = [str(PACKAGE.joinpath(*subpath.split(".")))]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a placeholder runs no code."""


class _PlaceholderModule(ModuleType):
    """Module in which every attribute is an exception class, valid in `except` and annotations."""

    def __getattr__(self, name: str) -> type[Exception]:
        # Python asks modules for `__path__` and others, and must not get a class.
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


if __name__ == "__main__":
    run_command()

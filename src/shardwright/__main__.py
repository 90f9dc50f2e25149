"""Run the command `shardwright`, also as `python -m shardwright`."""

from __future__ import annotations

import sys
from collections.abc import MutableSequence, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HELP_ROOMS = ("cli", "errors", "text_files", "progress")
"""Subpackages that `--help` imports; all others are imported only when a command runs."""

LOADING_NOTE = "loading torch"


def run_command() -> None:
    """Run the command line.

    Prints help without importing torch, which takes seconds. On a terminal or with `--progress`,
    prints a note before importing torch for any other command.
    """
    arguments = sys.argv[1:]
    note = ""
    if not arguments or arguments == ["--version"] or _is_help_requested(arguments):
        sys.meta_path.insert(0, EmptyModules())
    elif "--no-progress" in arguments:
        pass
    elif sys.stderr.isatty():
        note = f"{LOADING_NOTE}\r"
    elif "--progress" in arguments:
        # In the format of the progress lines that follow, whose seconds count from now.
        note = f"{0:6.1f} s  {LOADING_NOTE}\n"
    sys.stderr.write(note)
    sys.stderr.flush()
    main = import_module("shardwright.cli").main
    if note.endswith("\r"):
        # Overwrites the note.
        sys.stderr.write(f"{' ' * len(LOADING_NOTE)}\r")
    main()


def _is_help_requested(arguments: Sequence[str]) -> bool:
    return arguments[-1] == "--help" and len(arguments) <= 2


class EmptyModules(MetaPathFinder, Loader):
    """Import hook that replaces torch, and subpackages not in `HELP_ROOMS`, with empty modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, subpath = fullname.partition(".")
        is_unused = package == "shardwright" and subpath.split(".")[0] not in HELP_ROOMS
        if is_unused or package == "torch":
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module stays empty."""


class _EmptyModule(ModuleType):
    """A module in which every name is an exception class, valid in `except` and annotations."""

    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type[Exception]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


if __name__ == "__main__":
    run_command()

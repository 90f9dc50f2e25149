"""`python -m shardwright` is the command `shardwright`."""

from __future__ import annotations

import sys
from collections.abc import MutableSequence, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

HELP_ROOMS = ("cli", "errors", "text_files", "progress")
"""Rooms that define the help of the commands. Commands call the others only when they run."""

LOADING = "loading torch"


def run_command() -> None:
    """The entry point of the command line.

    Help is printed without importing torch, which takes seconds. Before any other command a note
    about the import is printed on a terminal, and with --progress.
    """
    arguments = sys.argv[1:]
    note = ""
    if not arguments or arguments == ["--version"] or _asks_for_help(arguments):
        sys.meta_path.insert(0, EmptyModules())
    elif "--no-progress" in arguments:
        pass
    elif sys.stderr.isatty():
        note = f"{LOADING}\r"
    elif "--progress" in arguments:
        # The format of the progress lines that follow, which are counted from here.
        note = f"{0:6.1f} s  {LOADING}\n"
    sys.stderr.write(note)
    sys.stderr.flush()
    main = import_module("shardwright.cli").main
    if note.endswith("\r"):
        # Overwrites the note.
        sys.stderr.write(f"{' ' * len(LOADING)}\r")
    main()


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return arguments[-1] == "--help" and len(arguments) <= 2


class EmptyModules(MetaPathFinder, Loader):
    """Imports torch, and the rooms that help does not need, as empty modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        is_unused = package == "shardwright" and rest.split(".")[0] not in HELP_ROOMS
        if is_unused or package == "torch":
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty."""


class _Empty(ModuleType):
    """A module in which every name is an unused exception class, which can also stand in `except`
    clauses and annotations."""

    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type[Exception]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


if __name__ == "__main__":
    run_command()

"""`python -m shardwright` is the command `shardwright`."""

from __future__ import annotations

import sys
from collections.abc import MutableSequence, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

READ = ("cli", "errors", "text_files", "progress")
"""Rooms that say what the help of a command is; all others only run."""

LOADING = "loading torch"


def run_command() -> None:
    """The entry point. Help is printed without what commands run, which takes seconds to import;
    who waits for that at a terminal, or asks for progress, is told so."""
    arguments = sys.argv[1:]
    told = ""
    if not arguments or arguments == ["--version"] or _asks_for_help(arguments):
        sys.meta_path.insert(0, Unloaded())
    elif "--no-progress" in arguments:
        pass
    elif sys.stderr.isatty():
        told = f"{LOADING}\r"
    elif "--progress" in arguments:
        told = f"{0:6.1f} s  {LOADING}\n"
    sys.stderr.write(told)
    sys.stderr.flush()
    main = import_module("shardwright.cli").main
    if told.endswith("\r"):
        sys.stderr.write(f"{' ' * len(LOADING)}\r")
    main()


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return arguments[-1] == "--help" and len(arguments) <= 2


class Unloaded(MetaPathFinder, Loader):
    """Puts empty modules in the place of torch and of rooms that help does not read."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        runs = package == "shardwright" and rest.split(".")[0] not in READ
        return ModuleSpec(fullname, self, is_package=True) if runs or package == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is empty."""


class _Empty(ModuleType):
    """A module all of whose names are classes that nobody uses."""

    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type[Exception]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


if __name__ == "__main__":
    run_command()

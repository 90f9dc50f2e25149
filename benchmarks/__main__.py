"""Runs the benchmarks and prints them. With `--full` they measure all of their cases, and what they
find is written to docs/benchmarks.md, or to a page of its own.

Exits with status 1 if a number misses its goal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.collect import measure, names
from benchmarks.page import (
    OWN_PAGES,
    PAGE,
    ROOT,
    facts,
    own_page,
    page,
    title_and_text,
    with_section,
)
from benchmarks.size import Size
from benchmarks.table import Table
from shardwright.errors import ShardwrightError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=names(), help="run this one")
    parser.add_argument("--full", action="store_true", help="all cases, written into the page")
    parser.add_argument("--rows", type=Path, help="with --only published: these runs")
    options = parser.parse_args(arguments)
    if options.rows is not None and (options.only != "published" or options.full):
        parser.error("--rows goes with --only published, and without --full")
    size = Size.FULL if options.full else Size.DEFAULT
    console = Console()
    found: dict[str, tuple[str, list[Table]]] = {}
    seconds: dict[str, float] = {}
    for name in [options.only] if options.only else names():
        started = time.perf_counter()
        try:
            with console.status(f"measuring: {name}"):
                found[name] = measure(name, size, *filter(None, [options.rows]))
        except ShardwrightError as error:
            parser.error(str(error))
        seconds[name] = time.perf_counter() - started
        docstring, tables = found[name]
        title, text = title_and_text(docstring)
        console.rule(f"[bold]{title}")
        console.print(text, "", *(table.rich() for table in tables), sep="\n", highlight=False)
        console.print(f"[dim]{seconds[name]:.0f} s", highlight=False)
    if len(seconds) > 1:
        console.print(_seconds(seconds).rich())
    if size is Size.FULL:
        _write(console, found, whole=not options.only)
    missed = [goal for _, tables in found.values() for table in tables for goal in table.missed]
    for goal in missed:
        console.print(f"[bold red]missed:[/] {goal}", highlight=False)
    return 1 if missed else 0


def _seconds(seconds: Mapping[str, float]) -> Table:
    table = Table("Wall time", ("benchmark", "seconds"))
    for name, each in seconds.items():
        table.add(name, f"{each:.0f}")
    table.add("all", f"{sum(seconds.values()):.0f}")
    return table


def _write(console: Console, found: Mapping[str, tuple[str, list[Table]]], whole: bool) -> None:
    """Writes what was measured: all of the page, or one section of it, or a page of its own."""
    sections = {}
    for name, (docstring, tables) in found.items():
        if name in OWN_PAGES:
            _write_file(console, OWN_PAGES[name], own_page(name, docstring, tables, facts()))
        else:
            sections[docstring] = tables
    if whole:
        _write_file(console, PAGE, page(sections, facts()))
        return
    for docstring, tables in sections.items():
        text = with_section(PAGE.read_text(encoding="utf-8"), docstring, tables, facts())
        _write_file(console, PAGE, text)


def _write_file(console: Console, path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    console.print(f"written to {path.relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())

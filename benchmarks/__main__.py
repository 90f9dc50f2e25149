"""Runs the benchmarks, prints them, and writes docs/benchmarks.md and the pages that some have for
themselves if all were run, or one with `--write`.

Exits with status 1 if a number misses its goal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
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
from benchmarks.table import Table
from shardwright.errors import ShardwrightError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=names(), help="run this one")
    parser.add_argument("--write", action="store_true", help="with --only: into the page too")
    parser.add_argument("--rows", type=Path, help="with --only published: these runs")
    options = parser.parse_args(arguments)
    only = options.only
    if options.rows is not None and (only != "published" or options.write):
        parser.error("--rows goes with --only published, and without --write")
    runs = [options.rows] if options.rows is not None else []
    console = Console()
    sections: dict[str, list[Table]] = {}
    missed: list[str] = []
    writes = options.write or not only
    for name in [only] if only else names():
        started = time.perf_counter()
        try:
            with console.status(f"measuring: {name}"):
                docstring, tables = measure(name, *runs)
        except ShardwrightError as error:
            parser.error(str(error))
        title, text = title_and_text(docstring)
        console.rule(f"[bold]{title}")
        console.print(text, "", *(table.rich() for table in tables), sep="\n", highlight=False)
        console.print(f"[dim]{time.perf_counter() - started:.0f} s", highlight=False)
        missed += [goal for table in tables for goal in table.missed]
        if name not in OWN_PAGES:
            sections[docstring] = tables
        elif writes:
            _write(console, OWN_PAGES[name], own_page(name, docstring, tables, facts()))
    if not only:
        _write(console, PAGE, page(sections, facts()))
    elif writes and sections:
        text = PAGE.read_text(encoding="utf-8")
        for docstring, tables in sections.items():
            text = with_section(text, docstring, tables, facts())
        _write(console, PAGE, text)
    for goal in missed:
        console.print(f"[bold red]missed:[/] {goal}", highlight=False)
    return 1 if missed else 0


def _write(console: Console, path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    console.print(f"written to {path.relative_to(ROOT)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())

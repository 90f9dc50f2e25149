"""Runs the benchmarks, prints them, and writes docs/benchmarks.md if all were run, or one with
`--write`.

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
from benchmarks.page import PAGE, ROOT, facts, page, title_and_text, with_section
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
        sections[docstring] = tables
    if only and options.write:
        ((docstring, tables),) = sections.items()
        text = with_section(PAGE.read_text(encoding="utf-8"), docstring, tables, facts())
        PAGE.write_text(text, encoding="utf-8")
    elif not only:
        PAGE.write_text(page(sections, facts()), encoding="utf-8")
    if options.write or not only:
        console.print(f"written to {PAGE.relative_to(ROOT)}", highlight=False)
    missed = [goal for tables in sections.values() for table in tables for goal in table.missed]
    for goal in missed:
        console.print(f"[bold red]missed:[/] {goal}", highlight=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

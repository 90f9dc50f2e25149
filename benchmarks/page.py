"""The page docs/benchmarks.md."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.table import Table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
COMMAND = "python -m benchmarks --full"

OWN_PAGES = {"zoo": PAGE.with_name("zoo.md")}
"""Of benchmarks whose tables are long."""


def facts() -> dict[str, str]:
    """When, what and on which machine is measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "command": f"`{COMMAND}`, which `make bench FULL=1` runs",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores; one thread is used",
    }


def page(sections: Mapping[str, Sequence[Table]], about: Mapping[str, str]) -> str:
    """The text.

    Args:
        sections: for the docstring of each benchmark what it measured.
        about: facts, as `facts` gives them.
    """
    head = Table("How this page was made", ("", ""))
    for item in about.items():
        head.add(*item)
    parts = [
        "# Benchmarks",
        "`make bench FULL=1` regenerates this page, in some hours. Times depend on the machine;"
        " ratios, growth and bytes should be the same everywhere."
        f" `{COMMAND} --only NAME` replaces one section, with a date and a commit of its own."
        " Without `--full` the same benchmarks measure fewer cases, in about two minutes each, and"
        " print what they find.",
        head.markdown(),
        *(_section(docstring, tables) for docstring, tables in sections.items()),
    ]
    return "\n\n".join(parts) + "\n"


def with_section(
    text: str, docstring: str, tables: Sequence[Table], about: Mapping[str, str]
) -> str:
    """The page `text` with what one benchmark measured in place of its section, or at the end."""
    head, *sections = text.rstrip("\n").split("\n\n## ")
    title, _ = title_and_text(docstring)
    note = f"*Measured {about['date']}, commit {about['commit']}, by itself.*"
    new = _section(docstring, tables, note).removeprefix("## ")
    titles = [section.partition("\n")[0] for section in sections]
    if title in titles:
        sections[titles.index(title)] = new
    else:
        sections.append(new)
    return "\n\n## ".join([head, *sections]) + "\n"


def own_page(name: str, docstring: str, tables: Sequence[Table], about: Mapping[str, str]) -> str:
    """The text of the page that one benchmark has for itself."""
    note = (
        f"*Measured {about['date']}, commit {about['commit']}, torch {about['torch']}, "
        f"transformers {about['transformers']}, by `{COMMAND} --only {name}`.*"
    )
    return _section(docstring, tables, note).removeprefix("#") + "\n"


def _section(docstring: str, tables: Sequence[Table], note: str = "") -> str:
    title, text = title_and_text(docstring)
    parts = (f"## {title}", note, text, *(table.markdown() for table in tables))
    return "\n\n".join(part for part in parts if part)


def title_and_text(docstring: str) -> tuple[str, str]:
    """The first line, and the other paragraphs, a line each."""
    title, _, text = docstring.strip().partition("\n")
    paragraphs = text.strip().split("\n\n")
    return title, "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def commit() -> str:
    """The current commit, with `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not under version control"
    return described.stdout.strip()

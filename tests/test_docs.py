"""What the pages show is what happens."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import shardwright

MODULES = [
    module.name
    for module in pkgutil.walk_packages(shardwright.__path__, "shardwright.")
    if not module.name.endswith("__main__")
]
PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


def test_there_are_pages() -> None:
    assert PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_print_what_it_says(page: Path) -> None:
    # Fences become empty lines, which end what is expected.
    lines = page.read_text(encoding="utf-8").splitlines()
    text = "\n".join("" if line.startswith("```") else line for line in lines)
    shown = doctest.DocTestParser().get_doctest(text, {}, page.stem, str(page), 0)
    assert not doctest.DocTestRunner().run(shown).failed


def test_the_examples_of_docstrings_print_what_they_say() -> None:
    results = [doctest.testmod(importlib.import_module(name)) for name in MODULES]
    assert sum(result.attempted for result in results) > 10
    assert sum(result.failed for result in results) == 0

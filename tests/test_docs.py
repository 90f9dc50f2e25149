"""What the pages show is what happens."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import shardwright
from shardwright.config import parse

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_configurations_of_a_page_are_valid(page: Path) -> None:
    fences = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for text in fences:
        if text.startswith("model:"):
            parse(text, page.name)


def test_the_examples_of_docstrings_print_what_they_say() -> None:
    results = [doctest.testmod(importlib.import_module(name)) for name in MODULES]
    assert sum(result.attempted for result in results) > 10
    assert sum(result.failed for result in results) == 0

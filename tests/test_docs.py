"""What the pages show is what happens."""

import doctest
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


def test_there_are_pages():
    assert PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_print_what_it_says(page):
    # Fences become empty lines, which end what is expected.
    lines = page.read_text(encoding="utf-8").splitlines()
    text = "\n".join("" if line.startswith("```") else line for line in lines)
    shown = doctest.DocTestParser().get_doctest(text, {}, page.stem, str(page), 0)
    assert not doctest.DocTestRunner().run(shown).failed

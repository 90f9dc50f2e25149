"""The worst patterns of a private dialect are in no docstring, message or page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from source_texts import ROOT, SourceText, docstrings, messages

PAGES = sorted((ROOT / "docs").glob("*.md"))

LATER = ("core/capture",)
"""Rooms whose texts are not yet rewritten."""

ANYWHERE = {
    "a text that needs its neighbor": r"\b[Ll]ikewise\b|\bas above\b|\bThe same,",
    "a number without a value": r"\bso many\b",
    "an inverted passive": r"(?:^|[.:;] )[A-Z]\w+(?:ed|en) (?:is|are) (?!not\b|never\b)",
}
FIRST_WORDS = r"(?:What|Who|Whom|Which|Whose)\b"
"""A relative clause where a verb or a noun belongs; `Whether` is fine for a truth value."""


def objections(text: str) -> list[str]:
    """The patterns that a text contains."""
    words = " ".join(text.split())
    return [reason for reason, pattern in ANYWHERE.items() if re.search(pattern, words)]


def report(texts: Iterable[SourceText], first_words: str = "") -> str:
    """The texts that contain a pattern, with the reasons."""
    lines = []
    for each in texts:
        reasons = objections(each.text)
        if first_words and re.match(first_words, each.text.strip()):
            reasons.append("a relative clause as first words")
        if reasons and each.room not in LATER:
            lines.append(f"{each}\n  {'; '.join(reasons)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "Likewise, for a list.",
        "Checked as above.",
        "The same, aligned.",
        "Runs on so many devices.",
        "Refused are gradients through random draws.",
        "Raises an error. Compared are the numbers of all ranks.",
    ],
)
def test_each_pattern_is_recognized(text: str) -> None:
    assert objections(text)


@pytest.mark.parametrize(
    "text",
    ["Parameters are sharded.", "Gradients that are needed are reduced."],
)
def test_plain_sentences_are_not(text: str) -> None:
    assert not objections(text)


def test_docstrings() -> None:
    assert report(docstrings(), FIRST_WORDS) == ""


def test_messages() -> None:
    assert report(messages()) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [line for line in prose.splitlines() if objections(line)]
    assert found == []

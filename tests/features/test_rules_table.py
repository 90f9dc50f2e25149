"""The table of all operators with rules, and the page that quotes it."""

from __future__ import annotations

from pathlib import Path

from operators_page import rules_table

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


def test_the_page_quotes_the_table() -> None:
    quoted = PAGE.read_text().partition("## Which operators have one")[2]
    rows = [line for line in quoted.splitlines() if line.startswith("|")]
    printed = rules_table().splitlines()
    assert len(rows) > 20
    assert [row for row in rows if row not in printed] == []


def test_every_kind_of_rule_is_listed_once() -> None:
    rows = rules_table().splitlines()
    assert "| linear | `b s k, j k -> b s j` | `k` |" in rows
    assert len(rows) == len(set(rows))

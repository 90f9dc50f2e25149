"""The table of all operators with rules."""

from __future__ import annotations

from operators_page import rules_table


def test_every_kind_of_rule_is_listed_once() -> None:
    rows = rules_table().splitlines()
    assert "| linear | `b s k, j k -> b s j` | `k` |" in rows
    assert len(rows) == len(set(rows))

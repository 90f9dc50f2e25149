"""No command prints control characters that are in names, keys, files or errors."""

from __future__ import annotations

import sys
import unicodedata
from io import StringIO
from pathlib import Path

import pytest
from benchmarks.terminals import HOSTILE, cases, control_characters
from rich.table import Table

from shardwright.core.plan.text_columns import PrintableConsole
from shardwright.errors import PlanError, ShardwrightWarning, printable


def test_commands_print_no_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "hostile_model", raising=False)
    found = {
        name: control_characters(tmp_path, arguments) for name, arguments in cases(tmp_path).items()
    }
    assert found == {name: set() for name in found}


def test_all_characters_that_control_a_terminal_are_escaped() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    categories = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    left = {each for each in printable(everything) if unicodedata.category(each) in categories}
    assert left == {"\n", "\t"}
    assert printable("a\n\tb\x1b\U000e0041é漢") == "a\n\tb\\u001b\\udb40\\udc41é漢"
    assert printable("a-b\nc", lines=False) == "a-b\\u000ac"


def test_messages_and_plans_of_a_program_are_printable() -> None:
    for kind in (PlanError, ShardwrightWarning):
        assert "\x1b" not in str(kind(HOSTILE))
    assert HOSTILE in PlanError(HOSTILE).args[0]


def test_a_console_keeps_its_own_colors_on_a_terminal() -> None:
    console = PrintableConsole(
        file=StringIO(), force_terminal=True, width=60, color_system="standard"
    )
    table = Table("name", style="red")
    table.add_row(HOSTILE)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[31m" in text
    assert "\x1b[2J" not in text and "\u202e" not in text

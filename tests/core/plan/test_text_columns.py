"""Text at any width: names break at dots, numbers never."""

import pytest

from shardwright.core.plan.text_columns import (
    MAX_WIDTH,
    MIN_WIDTH,
    format_columns,
    split_at_dots,
    text_width,
)


def test_names_break_behind_dots_and_ranges_stay_whole() -> None:
    lines = split_at_dots("model.layers.{0..79}.self_attn.{q_proj,k_proj}", 16)
    assert lines == ["model.layers.", "{0..79}.", "self_attn.", "{q_proj,k_proj}"]


@pytest.mark.parametrize("text", ["", "x" * 50, "...", "a. b,c..d", "a.{1..2,4}.b, c"])
@pytest.mark.parametrize("width", [1, 5, 80])
def test_no_line_is_too_long_and_nothing_but_spaces_is_lost(text: str, width: int) -> None:
    lines = split_at_dots(text, width)
    assert all(0 < len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_columns_keep_to_the_width_and_numbers_stay_whole() -> None:
    rows = [("a.very.long.path." * 9, "column-parallel over tp, " * 4, "1.5 GiB", "2 s")]
    for width in (40, 80, 160):
        lines = format_columns(("", "split", "sends", "computes"), rows, width)
        assert max(map(len, lines)) <= width
        assert lines[1].endswith("1.5 GiB       2 s")
        assert "…" in lines[2] or width == 160


def test_the_width_is_that_of_the_terminal_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("20", MIN_WIDTH), ("100", 100), ("900", MAX_WIDTH)):
        monkeypatch.setenv("COLUMNS", columns)
        assert text_width() == width

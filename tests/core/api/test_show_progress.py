"""What a long call is doing is shown as a bar where there is a terminal or a notebook."""

import io
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module

import pytest
from rich.console import Console

import shardwright as sw


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(wanted: bool | None = None) -> str:
    """What is written there of two parts."""
    terminal = Terminal()
    with redirect_stderr(terminal), sw.show_progress(wanted) as told:
        told("first")
        told("second", 1, 4)
    return terminal.getvalue()


def test_a_terminal_shows_the_newest_part_on_one_line_that_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    written = on_a_terminal()
    assert "second" in written
    assert written.endswith("\x1b[2K"), "the line is erased"


def test_a_terminal_that_wants_none_stays_empty() -> None:
    assert on_a_terminal(wanted=False) == ""


def test_what_is_no_terminal_stays_empty(capfd: pytest.CaptureFixture[str]) -> None:
    for wanted in (None, False):
        with sw.show_progress(wanted) as told:
            told("first")
    assert capfd.readouterr() == ("", "")


def test_the_log_of_a_long_call_has_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with sw.show_progress() as told:
        for now in range(1000, 1150):
            told(f"second {now - 1000}")
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == ["second 20", "second 80", "second 140"]


def test_lines_are_written_where_they_are_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with sw.show_progress(True) as told:
        told("first")
        told("second", 1, 4)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == ["first", "second (2 of 4)"]


def test_a_notebook_without_ipywidgets_shows_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = import_module("shardwright.core.api.show_progress")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "Console", partial(Console, force_jupyter=True))
    with sw.show_progress() as told:
        told("first")
    assert capfd.readouterr().err.endswith(" s  first\n")


def test_a_log_that_cannot_be_written_does_not_end_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    with sw.show_progress(True) as told:
        told("first")

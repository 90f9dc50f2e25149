"""What long commands are doing is said on stderr: on a terminal, or where it is asked for."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.cli.options import progress
from shardwright.progress import TimeLeft, within

OWN = """
model: {name: llama2_7b_tiny, arguments: {num_layers: 1}}
data: {name: text, seq_length: 32, batch_size: 8}
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(wanted: bool | None = None) -> str:
    """What is written there of two parts."""
    terminal = Terminal()
    with redirect_stderr(terminal), progress(wanted) as told:
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
    with progress() as told:
        told("first")
    assert capfd.readouterr() == ("", "")


def test_a_part_of_a_part_is_named_after_it_and_counts_as_it() -> None:
    heard: list[tuple[str, int, int]] = []

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        heard.append((doing, done, of))

    within(within(on_progress, "llama", 1, 3), "auto")("search", 4, 5)
    assert heard == [("llama: auto: search", 1, 3)]


def test_what_is_left_takes_as_long_as_what_was_done() -> None:
    now = 100.0
    left = TimeLeft(lambda: now)
    assert left.seconds(0, 0) is None
    assert left.seconds(2, 10) is None, "nothing is known of how long one takes"
    now = 106.0
    assert left.seconds(4, 10) == 18.0
    assert left.seconds(4, 14) == 30.0, "more was added"
    assert left.seconds(0, 5) is None, "something else is counted"


def test_a_search_under_a_memory_limit_counts_what_waits() -> None:
    heard: list[tuple[int, int]] = []

    def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
        heard.append((done, of))

    net, batch = nn.Linear(64, 64), (torch.zeros(32, 64),)
    sw.plan(net, batch, devices=4, cluster="h100", memory_limit="42KiB", on_progress=on_progress)
    counts = [(done, of) for done, of in heard if of]
    assert counts == sorted(counts, key=lambda each: each[0])
    assert all(done < of for done, of in counts) and len({done for done, _ in counts}) > 1


def parts(stderr: str) -> list[str]:
    """What each line says, without its seconds."""
    return [line.split(" s  ", 1)[1] for line in stderr.splitlines() if " s  " in line]


def test_plan_says_each_part_on_stderr_and_leaves_stdout_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OWN)
    command = ["plan", str(path), "--devices", "2"]
    quiet = CliRunner().invoke(app, command)
    told = CliRunner().invoke(app, [*command, "--progress"])
    assert quiet.stderr == ""
    assert told.stdout.splitlines()[:-5] == quiet.stdout.splitlines()[:-5]
    assert "search: mem_coeff=0.1" in parts(told.stderr)


def test_tune_counts_its_values(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OWN)
    result = CliRunner().invoke(app, ["tune", str(path), "--devices", "2", "--progress"])
    said = parts(result.stderr)
    assert "mem_coeff 0.00625: search: mem_coeff=0.00625 (1 of 11)" in said
    last = said[-1].partition(",")[0]
    assert last == "mem_coeff 6553.6: memory (11 of 11"
    assert said[-1].endswith(" s left)")

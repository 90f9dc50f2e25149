"""Whatever is written behind `shardwright` ends in success or one error of one screen."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import cli

MODEL = """
from torch import nn

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
CONFIG = """
model: {target: "model_of_arguments:network"}
data: {name: digits, batch_size: 8}
"""

FILES = {
    "plan": ("config.yaml",),
    "explain": ("config.yaml", "net"),
    "check": ("config.yaml",),
    "tune": ("config.yaml",),
    "train": ("config.yaml",),
    "compare": ("config.yaml",),
    "diff": ("plan.json", "plan.json"),
    "report": ("plan.json",),
    "launch": ("script.py",),
}
"""The commands and the arguments that each takes."""

PLACES = (
    *("missing.yaml", "folder", "folder/x", "config.yaml/x", "empty", "binary", "loop", "broken"),
    *("", "a" * 300, "\udcff", "é☃", "[red]x[/red]", "-", ".", "/dev/null", "x\ny"),
)
SCRIPTS = ("empty", "binary", "/dev/null")
"""They may contain anything."""

NUMBERS = ("", "x", "0", "-1", "1.5", "nan", "9" * 20, "٣", "\udcff", "2")
WORDS = ("", "x", "nan", "-1", "local.yaml", "folder", "binary", "2:4", "4:2", "a:b", "\udcff")

OPTIONS = {
    "--devices": NUMBERS,
    "--out": PLACES,
    "--save-graphs": PLACES,
    "--mem-coeff": WORDS,
    "--memory-limit": WORDS,
    "--cluster": WORDS,
    "--rounds": NUMBERS,
    "--run": WORDS,
    "--json": (),
    "--nonsense": (),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model_of_arguments", raising=False)
    (tmp_path / "model_of_arguments.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("nowhere")
    return tmp_path


def ending(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit status, and what is written to stderr; which escapes what is not UTF-8."""
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    status = 0
    with contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as done:
            status = int(done.code or 0)
    err.flush()
    return status, err.buffer.getvalue().decode()  # type: ignore[attr-defined]


def assert_one_error(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """And returns it."""
    status, err = ending(arguments, monkeypatch)
    assert status == 2, arguments
    usage = sum(line.startswith("Error: ") for line in err.splitlines())
    assert usage == 1 or (not usage and err.startswith("error: ")), (arguments, err)
    assert "Traceback" not in err, arguments
    return err


@pytest.mark.parametrize("command", FILES)
def test_a_missing_file_is_named_before_options_that_are_missing(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = assert_one_error([command, "missing.yaml"], monkeypatch)
    assert "missing.yaml" in err and "devices" not in err


@pytest.mark.parametrize("command", FILES)
def test_a_wrong_place_of_a_file_is_one_error(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FILES[command]
    options = [] if command in ("diff", "report") else ["--devices", "2"]
    for place, at in itertools.product(PLACES, range(len(files))):
        if files[at] == "net" or (command == "launch" and place in SCRIPTS):
            continue
        wrong = [*files[:at], place, *files[at + 1 :]]
        assert_one_error([command, *options, *wrong], monkeypatch)


@pytest.mark.parametrize("option", ["--out", "--save-graphs"])
@pytest.mark.parametrize("place", ["config.yaml/x", "a" * 300, "/dev/full", "loop"])
def test_a_place_that_cannot_be_written_is_one_error(
    option: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_error(["plan", "config.yaml", "--devices", "2", option, place], monkeypatch)


@pytest.mark.parametrize("place", ["folder", "config.yaml/x", "a" * 300, "/dev/full", "loop", "."])
def test_a_place_where_no_page_can_be_is_one_error(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.plan(nn.Linear(4, 4), (torch.zeros(4, 4),), devices=2).save("plan.json")
    assert ending(["report", "plan.json"], monkeypatch)[0] == 0
    assert_one_error(["report", "plan.json", "--out", place], monkeypatch)


@pytest.mark.parametrize("place", ["config.yaml", "config.yaml/x", "loop", "a" * 300])
def test_a_log_folder_that_cannot_be_is_one_error(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_error(["train", "config.yaml", "--log-dir", place], monkeypatch)


def test_random_arguments_end_in_success_or_one_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, ends = random.Random(12), list[int]()
    for _ in range(60):
        command = draw.choice(["plan", "explain", "diff", "compare", "models", "nonsense"])
        arguments = [command, *FILES.get(command, ()), "--devices", "2"]
        for option in draw.sample([*OPTIONS], draw.choice((0, 1, 1, 2))):
            values = OPTIONS[option]
            arguments += [option, draw.choice(values)] if values else [option]
        if draw.random() < 0.3:
            draw.shuffle(arguments)
        status, err = ending(arguments, monkeypatch)
        ends.append(status)
        assert status in (0, 2), (arguments, err)
        if status == 2:
            assert_one_error(arguments, monkeypatch)
    assert 0 in ends


@pytest.mark.parametrize("devices", ["9" * 20, "100000", "0"])
@pytest.mark.parametrize("command", [["calibrate"], ["launch", "script.py"]])
def test_more_processes_than_a_machine_has_are_refused(
    devices: str, command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *script = command
    assert_one_error([name, "--devices", devices, *script], monkeypatch)

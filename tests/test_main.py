"""Help comes at once, without torch, and is that of the commands with everything imported."""

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from shardwright import cli
from shardwright.__main__ import _make_unknown_keys_message

ENTRY_POINT_GROUP: Any = typer.main.get_command(cli.app)
CALLS = [["--help"], *([name, "--help"] for name in ENTRY_POINT_GROUP.commands)]

HELP = """
import json, sys
from typer.testing import CliRunner
from shardwright.__main__ import PlaceholderModules
sys.meta_path.insert(0, PlaceholderModules())
from shardwright import cli
def text(call): return CliRunner().invoke(cli.app, call, prog_name="shardwright").output
print(json.dumps([text(call) for call in json.loads(sys.argv[1])]))
"""

COMMAND = """
import atexit, sys, time
@atexit.register
def loaded(): print("\\n", time.process_time(), "torch.nn" in sys.modules or "numpy" in sys.modules)
from shardwright.__main__ import run_command
sys.argv = ["shardwright", "plan", "--help"]
run_command()
"""


def run(script: str, *arguments: str) -> str:
    words = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_without_torch_is_that_of_the_commands() -> None:
    imported = [CliRunner().invoke(cli.app, call, prog_name="shardwright").output for call in CALLS]
    assert len(imported) > 10 and "rehearse" in imported[0]
    assert max(len(line) for text in imported for line in text.splitlines()) <= 80
    assert json.loads(run(HELP, json.dumps(CALLS))) == imported


def test_help_of_a_command_loads_no_torch_and_takes_little_time() -> None:
    *help_text, last = run(COMMAND).strip().splitlines()
    assert any("--memory-limit" in line for line in help_text)
    seconds, loaded = last.split()
    assert float(seconds) < 4, "0.3 s where the machine is idle"
    assert loaded == "False"


@pytest.mark.parametrize(
    ("options", "first"),
    [(["--progress"], "   0.0 s  loading torch\n"), (["--no-progress"], ""), ([], "")],
)
def test_who_asks_for_progress_sees_it_before_torch_is_loaded(
    options: list[str], first: str
) -> None:
    script = COMMAND.replace('"plan", "--help"', '"models", *sys.argv[1:]').replace(
        "run_command()", "sys.modules['shardwright.cli'] = None\nrun_command()"
    )
    words = [sys.executable, "-c", script, *options]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stderr.partition("Traceback")[0] == first


def test_the_versions_are_printed_without_torch() -> None:
    script = COMMAND.replace('"plan", "--help"', '"--version"')
    versions, _, last = run(script).strip().splitlines()
    release = torch.__version__.partition("+")[0]  # what follows names the build's CUDA
    assert f"(torch {release}" in versions
    assert versions.endswith(f", Python {platform.python_version()})")
    assert last.split()[1] == "False"


def test_a_working_folder_that_was_deleted_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = "import os, sys; os.rmdir(os.getcwd()); sys.argv = ['shardwright', 'models']"
    script += "; from shardwright.__main__ import run_command; run_command()"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "gone", capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: the working folder cannot be used: No such file or dir")
    assert len(ended.stderr.splitlines()) == 2


CLOSED = """
import os, sys
from shardwright.__main__ import _make_standard_streams_usable
_make_standard_streams_usable()
print("→ lost"), print("lost", file=sys.stderr), os.system("echo lost"), os.write(1, b"lost")
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    assert sys.stdin.read() == ""
    os.fdopen(file.fileno(), "w", closefd=False).write(str(file.fileno()))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lose_what_is_printed_and_no_file_gets_it(
    tmp_path: Path, closed: str
) -> None:
    file = tmp_path / "file"
    words = [sys.executable, "-c", CLOSED, str(file)]
    shell = f"{shlex.join(words)} {closed}"
    done = subprocess.run(shell, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert (done.returncode, int(file.read_text()) > 2) == (0, True)


def test_characters_that_an_encoding_lacks_are_printed_as_escapes() -> None:
    script = (
        "from shardwright.__main__ import _make_standard_streams_usable\n"
        "_make_standard_streams_usable()\nprint('a → b')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("a \\u2192 b\n", "")


def test_a_pipe_is_not_read_before_the_command_reads_it(tmp_path: Path) -> None:
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pipe.open("w") as writer:
        writer.write("unknown: 1")
        writer.flush()
        assert _make_unknown_keys_message(["plan", str(pipe)]) == ""
        assert os.read(reader, 100) == b"unknown: 1"
    os.close(reader)

"""What lists the commands is what lists them with everything imported, and comes at once."""

import subprocess
import sys

from typer.testing import CliRunner

from shardwright import cli
from shardwright.__main__ import listing


def test_the_list_of_commands_read_from_their_source_is_that_of_the_commands() -> None:
    read, imported = (
        CliRunner().invoke(app, ["--help"], prog_name="shardwright").output
        for app in (listing(), cli.app)
    )
    assert "rehearse" in read
    assert read == imported


def test_help_needs_no_torch() -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
        "from shardwright.__main__ import run_command\n"
        "sys.argv = ['shardwright', '--help']; run_command()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "rehearse" in run.stdout
    assert run.stdout.endswith("False\n")

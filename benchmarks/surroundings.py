"""A command whose streams, folders, variables or limits are not those of a usual shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.bit_flips import RAW, REFUSED

SUCCESS, CHANGED, SECONDS = "success", "files changed", 120

MODEL = """
import torch
from torch import nn

def data():
    return torch.randn(16, 8), torch.randint(4, (16,))

def net():
    net = nn.Sequential()
    net.add_module("→é", nn.Linear(8, 4))
    return net
"""
CONFIG = """
model: {target: "surroundings_model:net"}
data: {target: "surroundings_model:data", batch_size: 8}
"""
SHELLS: Mapping[str, tuple[str, str]] = {
    "closed streams": ("{plan} <&- >&- 2>&-", SUCCESS),
    "a pipe that is read no further": ("{plan} --json | head -1", SUCCESS),
    "a full stdout": ("{plan} >/dev/full", REFUSED),
    "PYTHONIOENCODING=ascii": ("PYTHONIOENCODING=ascii {plan} --full", SUCCESS),
    "LC_ALL=C, no HOME, TERM=dumb, COLUMNS=1": (
        "unset HOME; LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 TERM=dumb COLUMNS=1 {plan}",
        SUCCESS,
    ),
    "a TMPDIR that does not exist": ("TMPDIR=/nonexistent {plan}", SUCCESS),
    "files of at most 0 bytes": ("ulimit -f 0; {plan} --out kept.json 2>&1 | cat", REFUSED),
    "a folder as configuration": ("mkdir x.yaml; {python} plan x.yaml --devices 2", REFUSED),
    "a pipe as configuration": ("mkfifo p.yaml; {python} plan p.yaml --devices 2", REFUSED),
    "a pipe as --out": ("mkfifo p.json; {plan} --out p.json", REFUSED),
    "--out that names the configuration": ("{plan} --out run.yaml", REFUSED),
    "a configuration in UTF-16": (
        "iconv -t UTF-16 run.yaml >w.yaml; {python} plan w.yaml --devices 2",
        REFUSED,
    ),
}
"""Shell commands, and how each ends, by what is unusual; `{plan}` plans the model."""


def write_files(folder: Path) -> None:
    (folder / "surroundings_model.py").write_text(MODEL, encoding="utf-8")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "kept.json").write_text("{}")


def ends_in(folder: Path, name: str) -> str:
    """How a shell command of `SHELLS` ends in a folder with the files of `write_files`."""
    python = f"{shlex.quote(sys.executable)} -m shardwright"
    shell, _ = SHELLS[name]
    before = _contents(folder)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell.format(python=python, plan=f"{python} {PLAN}")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=SECONDS,
    )
    printed = (done.stdout + done.stderr).decode(errors="replace")
    if any(_contents(folder).get(file) != content for file, content in before.items()):
        return CHANGED
    if "Traceback" in printed:
        return RAW
    # 141: SIGPIPE, as of other commands whose output is not read.
    if done.returncode in (0, 141) or (done.returncode == 1 and "| head" in shell):
        return SUCCESS
    return REFUSED if done.returncode == 2 and "error: " in printed else RAW


PLAN = "plan run.yaml --devices 2"


def _contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}

"""The page of a plan, and starts

The nine language models at full size from `configs/*_auto.yaml`, planned for 64 devices without
any. *Text*: lines of the summary at 80 columns, and its widest. *Page*: CPU seconds to write it
from the plan's file, and its size. *Starts*: wall time of a new process, the median of five;
`import shardwright` is beyond `import torch`, what a command shows first is that it loads torch.
*From nothing*: a new virtual environment, this checkout with what it needs installed into it, the
smallest LLaMA copied and its page written, with the torch of `constraints.txt`, from whatever pip
reaches here. Goals: summaries of at most 25 lines in 80 columns, pages under 5 MB, the import under
0.3 s beyond torch, something to see within a second.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds
from shardwright.core.plan import Plan
from shardwright.core.plan.table import plan_text
from shardwright.run.config.run import Run

DEVICES, TIMES = 64, 5
LINES, COLUMNS, MEGABYTES = 25, 80, 5.0
IMPORT, FIRST = 0.3, 1.0

COMMAND = ("-m", "shardwright")
TINY = ROOT / "configs" / "tiny" / "llama2_7b.yaml"


def run(size: Size = Size.DEFAULT) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        tables = [pages(Path(folder), size.of(4, full=1)), starts()]
        return [*tables, from_nothing(Path(folder))] if size is Size.FULL else tables


def pages(folder: Path, every: int) -> Table:
    """A row for one in `every` of the models."""
    table = Table("The page and the text", ("model", "lines", "widest", "page, s", "page, MB"))
    for file in sorted((ROOT / "configs").glob("*_auto.yaml"))[::every]:
        Run.from_file(file).for_devices(DEVICES).plan(DEVICES).save(folder / "plan.json")
        plan, html = Plan.load(folder / "plan.json"), folder / "page.html"
        seconds = cpu_seconds(partial(plan.report, html))
        lines = plan_text(plan, width=COLUMNS).splitlines()
        widest, size = max(map(len, lines)), html.stat().st_size / 1e6
        name = file.stem.removesuffix("_auto")
        table.add(name, len(lines), widest, f"{seconds:.1f}", f"{size:.2f}")
        if len(lines) > LINES or widest > COLUMNS:
            table.missed.append(f"{name}: {len(lines)} lines of {widest} columns")
        if size > MEGABYTES:
            table.missed.append(f"{name}: a page of {size:.2f} MB")
    return table


def starts() -> Table:
    """Of new processes."""
    table = Table("Starts", ("what", "seconds"))
    torch = _seconds("-c", "import torch")
    beyond = _seconds("-c", "import torch, shardwright") - torch
    table.add("import torch", f"{torch:.2f}")
    table.add("import shardwright, beyond that", f"{beyond:.2f}")
    if beyond > IMPORT:
        table.missed.append(f"importing shardwright takes {beyond:.2f} s beyond torch")
    table.add("shardwright --version", f"{_seconds(*COMMAND, '--version'):.2f}")
    table.add("shardwright plan --help", f"{_seconds(*COMMAND, 'plan', '--help'):.2f}")
    first = statistics.median(_first_line() for _ in range(TIMES))
    table.add("shardwright plan, to what it shows first", f"{first:.2f}")
    if first > FIRST:
        table.missed.append(f"shardwright plan shows something after {first:.2f} s")
    return table


def from_nothing(folder: Path) -> Table:
    """Each step from an empty folder to the first page."""
    table = Table("From nothing to the first page", ("step", "seconds"))
    python = folder / "venv" / "bin" / "python"
    install = [*("-m", "pip", "install", "--quiet"), "-c", str(ROOT / "constraints.txt")]
    steps: dict[str, list[str]] = {
        "python -m venv": [sys.executable, "-m", "venv", str(folder / "venv")],
        "pip install, with tools": [str(python), *install, f"{ROOT}[tools]"],
        "shardwright init llama": [str(python), *COMMAND, "init", "llama"],
        "shardwright report llama2_7b.yaml --devices 8": [
            *(str(python), *COMMAND, "report", "llama2_7b.yaml", "--devices", "8")
        ],
    }
    everything = 0.0
    for name, command in steps.items():
        started = time.perf_counter()
        subprocess.run(command, cwd=folder, env=_environment(), check=True, capture_output=True)
        seconds = time.perf_counter() - started
        everything += seconds
        table.add(name, f"{seconds:.1f}")
    table.add("all", f"{everything:.1f}")
    return table


def _seconds(*arguments: str) -> float:
    """How long a Python process lives, the median of several."""
    return statistics.median(_lives(arguments) for _ in range(TIMES))


def _lives(arguments: tuple[str, ...]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def _first_line() -> float:
    """Until the command that plans shows anything."""
    command = [sys.executable, *COMMAND, "plan", str(TINY), "--devices", "8", "--progress"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.read(1)
        shown = time.perf_counter() - started
        process.communicate()
    return shown


def _environment() -> dict[str, str]:
    """Without what would lead the new environment to this checkout."""
    return dict(_kept())


def _kept() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if name not in ("PYTHONPATH", "VIRTUAL_ENV"):
            yield name, value

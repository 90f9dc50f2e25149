"""Scripts

Training scripts as people write them, in `benchmarks/scripts/`, each beside the same script for
several devices. The first trains 6 steps on one device. The second trains 3 on 4 processes with
gloo, saves, and is started again on 2 processes, where it resumes, trains the other 3, and then
generates text, predicts classes or chooses actions. Losses and gradient norms of
all steps and the final results are compared. Goal: at most 5 lines are added or changed, and all is
equal.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path

from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.torchrun import python

SCRIPTS = {
    "nanogpt": "a GPT with a loop of its own",
    "lora": "`Trainer` with LoRA",
    "sft": "`SFTTrainer` with LoRA",
    "images": "an image classifier",
    "actor_critic": "an actor and a critic",
}
FOLDER = ROOT / "benchmarks" / "scripts"
MOST_LINES, STEPS, RANKS, RANKS_RESUMED = 5, 6, 4, 2
TOLERANCE = 1e-3
"""Relative, of float32 after 6 steps."""

NUMBER = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class Comparison:
    """A script on several devices, compared with itself on one.

    Args:
        saved: the largest relative difference of the steps before it was saved.
        resumed: likewise of those after it has resumed.
        output: whether the last line that it prints is the same.
    """

    saved: float
    resumed: float
    output: bool

    @property
    def is_equal(self) -> bool:
        return max(self.saved, self.resumed) < TOLERANCE and self.output


def run(size: Size = Size.DEFAULT) -> list[Table]:
    columns = ("script", "lines", "in place of", "difference", "resumed", "output")
    table = Table("Scripts on 4 processes, and resumed on 2", columns)
    for name in size.of(("nanogpt", "images"), full=tuple(SCRIPTS)):
        words = SCRIPTS[name]
        added, removed = changed_lines(name)
        if name == "sft" and find_spec("trl") is None:
            table.add(words, added, removed, "trl is not installed", "", "")
            continue
        found = compare(name)
        output = "equal" if found.output else "different"
        table.add(words, added, removed, f"{found.saved:.0e}", f"{found.resumed:.0e}", output)
        if added > MOST_LINES or not found.is_equal:
            table.missed.append(f"{name}: {added} lines, {found}")
    return [table]


def changed_lines(name: str) -> tuple[int, int]:
    """How many lines of a script differ for several devices, as they are there and as they were;
    empty ones are not counted."""
    plain, parallel = (
        (FOLDER / f"{name}{suffix}.py").read_text(encoding="utf-8").splitlines()
        for suffix in ("", "_parallel")
    )
    lines = list(unified_diff(plain, parallel, n=0))[2:]
    added, removed = (sum(line[0] == sign != line for line in lines) for sign in "+-")
    return added, removed


def compare(name: str) -> Comparison:
    """Runs a script on one device and on several."""
    with tempfile.TemporaryDirectory() as folder:
        plain, split = (("--folder", str(Path(folder, each))) for each in ("plain", "split"))
        wanted = _lines(python(f"benchmarks.scripts.{name}", *plain, "--steps", str(STEPS)))
        half = str(STEPS // 2)
        before = _lines(_torchrun(name, RANKS, *split, "--steps", half))
        resume = (*split, "--steps", str(STEPS), "--resume")
        after = _lines(_torchrun(name, RANKS_RESUMED, *resume))
    middle = STEPS // 2
    saved = _difference(before[:middle], wanted[:middle])
    resumed = _difference(after[-1 - middle : -1], wanted[middle:-1])
    return Comparison(saved, resumed, after[-1] == wanted[-1])


def _torchrun(name: str, ranks: int, *arguments: str) -> str:
    """What rank 0 prints."""
    launcher = ("--standalone", f"--nproc-per-node={ranks}", "--local-ranks-filter=0")
    script = f"benchmarks.scripts.{name}_parallel"
    return python("torch.distributed.run", *launcher, "-m", script, *arguments)


def _lines(printed: str) -> list[str]:
    """Those of steps, and that of the output."""
    return [line for line in printed.splitlines() if line.startswith(("step ", "output "))]


def _difference(mine: list[str], wanted: list[str]) -> float:
    """The largest relative difference of the numbers of steps; infinite if steps are missing."""
    pairs = list(zip(mine, wanted, strict=False))
    if len(mine) != len(wanted) or any(a.split(":")[0] != b.split(":")[0] for a, b in pairs):
        return float("inf")
    numbers = [
        (float(a), float(b))
        for one, other in pairs
        for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in numbers)

"""A run whose processes are killed at random moments, beside one that is left in peace."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import shardwright as sw
from shardwright.run.config import Run
from shardwright.run.launch.log_folder import LogFolder

RANKS, EVERY, STEPS_PER_KILL = 4, 10, 40
"""Processes, steps between two checkpoints, and steps for each kill."""

VICTIMS = ("one rank", "two ranks", "launcher")
MOMENTS = ("training", "writing", "starting")

MODEL = """
import torch
from torch import nn

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator)
    return x, torch.randint(4, (256,), generator=generator)

def perceptron():
    # Large enough that a checkpoint takes a while to write.
    return nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 4),
    )
"""
CONFIG = """
model: {{target: "model_of_the_kills:perceptron"}}
data: {{target: "model_of_the_kills:data", batch_size: 16}}
optimizer: {{name: adamw, learning_rate: 0.003}}
train:
  {{epochs: 100000, steps: {steps}, checkpoint: {{folder: {name}, every: {every}, keep: 2{more}}}}}
"""


@dataclass
class KillReport:
    """What became of a run that was killed.

    Args:
        kills: how often who was killed, and when.
        equal: whether the final parameters are those of the undisturbed run, to the bit.
        lost, repeated: steps that its record lacks, or has twice.
        different: steps with another loss than in the undisturbed run.
    """

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    equal: bool = False
    lost: int = 0
    repeated: int = 0
    different: int = 0

    @property
    def is_undisturbed(self) -> bool:
        return self.equal and not (self.lost or self.repeated or self.different)


def kill_at_random(folder: Path, kills: int, seed: int = 0) -> KillReport:
    """Trains in `folder` twice, and the second time kills processes so many times.

    Raises:
        RuntimeError: a run ended otherwise than with success.
    """
    (folder / "model_of_the_kills.py").write_text(MODEL)
    steps, report, draw = kills * STEPS_PER_KILL, KillReport(), random.Random(seed)
    with _Trial(folder, "calm", steps) as calm:
        calm.finish()
    with _Trial(folder, "wild", steps, ", async: true") as wild:
        for number in range(kills):
            victim, moment = VICTIMS[number % 3], MOMENTS[number // 3 % 3]
            wild.kill(victim, moment, draw)
            report.kills[victim, moment] += 1
        wild.finish()
    first, second = calm.losses(), wild.losses()
    report.repeated = len(second) - len(dict(second))
    report.lost = len(dict(first).keys() - dict(second).keys())
    report.different = sum(dict(second).get(step) != loss for step, loss in first)
    pairs = zip(calm.parameters().values(), wild.parameters().values(), strict=True)
    report.equal = all(torch.equal(one, other) for one, other in pairs)
    return report


@dataclass
class _Trial:
    """One run, which is started as often as its launcher is killed."""

    folder: Path
    name: str
    steps: int
    more: str = ""
    launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Trial:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()

    def start(self) -> None:
        """Starts the launcher, which resumes if there is a checkpoint."""
        text = CONFIG.format(steps=self.steps, name=self.name, every=EVERY, more=self.more)
        (self.folder / f"{self.name}.yaml").write_text(text)
        options = ["--devices", str(RANKS), "--log-dir", str(self.logs.root), "--resume"]
        command = ["-m", "shardwright", "train", f"{self.name}.yaml", "--max-restarts", "1000"]
        with (self.folder / f"{self.name}.output").open("ab") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, *command, *options],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def finish(self) -> None:
        assert self.launcher is not None
        if self.launcher.wait() != 0:
            raise RuntimeError((self.folder / f"{self.name}.output").read_text())

    def kill(self, victim: str, moment: str, draw: random.Random) -> None:
        """Kills at the next such moment."""
        assert self.launcher is not None
        self._wait(lambda: len(self._ranks()) == RANKS)
        steps = self._steps_done() + draw.randrange(1, STEPS_PER_KILL // 2)
        end = time.monotonic() + (draw.uniform(0, 5) if moment == "starting" else 1e6)
        self._wait(lambda: self._steps_done() >= steps or time.monotonic() > end)
        time.sleep(draw.uniform(0, 0.02))
        if moment == "writing":
            self._wait(self._is_writing)
            time.sleep(draw.uniform(0, 0.002))
        ranks = self._ranks()
        victims = {
            "one rank": draw.sample(ranks, 1),
            "two ranks": draw.sample(ranks, 2),
            "launcher": [self.launcher.pid],
        }[victim]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if victim == "launcher":
            self.launcher.wait()
            self.start()
        else:
            self._wait(lambda: not set(victims) & set(self._ranks()))

    def _wait(self, fact: Callable[[], bool]) -> None:
        assert self.launcher is not None
        while not fact():
            if self.launcher.poll() is not None:
                raise RuntimeError((self.folder / f"{self.name}.output").read_text())
            time.sleep(0.0005)

    def _ranks(self) -> list[int]:
        """The processes of the ranks, while the launcher is there."""
        assert self.launcher is not None
        children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        try:
            return [int(pid) for pid in children.read_text().split()]
        except FileNotFoundError:
            return []

    def _is_writing(self) -> bool:
        """Whether a checkpoint is there in part."""
        files = (self.folder / self.name).glob("*.partial/*.distcp")
        return any(_size(file) > 0 for file in files)

    @property
    def logs(self) -> LogFolder:
        return LogFolder(self.folder / f"{self.name}_logs")

    def _steps_done(self) -> int:
        record = self.logs.steps(0)
        return record.read_text().count("\n") if record.exists() else 0

    def losses(self) -> list[tuple[tuple[int, int], float]]:
        lines = map(json.loads, self.logs.steps(0).read_text().splitlines())
        return [((line["epoch"], line["step"]), line["loss"]) for line in lines]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Those of the newest checkpoint."""
        net = Run.from_file(self.folder / f"{self.name}.yaml").model()
        sw.load_checkpoint(self.folder / self.name, net)
        return net.state_dict()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0

"""2,000 steps from the command line: what a long run holds does not grow with its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

STEPS, WARM = 2000, 500
EPOCH = 16
"""Steps, of which the first is printed."""

MODEL = '''
import json, os, sys, threading, time
import torch
from torch import nn
from torch.distributed import distributed_c10d

STEPS = "logs/1/rank.0/steps.jsonl"


def size(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def sample():
    """Each process notes twice a second what it holds."""
    with open(f"samples-{os.environ.get('RANK', 'launcher')}.jsonl", "w", buffering=1) as file:
        while True:
            time.sleep(0.5)
            held = {
                "log": size(STEPS),
                "memory": pages() * os.sysconf("SC_PAGE_SIZE"),
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "groups": len(distributed_c10d._world.pg_map),
                "objects": sys.getallocatedblocks(),
            }
            file.write(json.dumps(held) + chr(10))


threading.Thread(target=sample, daemon=True).start()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)
        self.down = nn.Linear(64, 8)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(256, 32, generator=generator), torch.randint(8, (256,), generator=generator)
'''
CONFIG = f"""
model: {{target: "soaked:Network"}}
data: {{target: "soaked:data", batch_size: 16}}
optimizer: {{name: adamw, learning_rate: 1e-3, clip_norm: 1.0}}
parallel: {{mem_coeff: 64, hsdp: {{level: level1, shard_size: 2, threshold: 0}}}}
train: {{epochs: {STEPS // EPOCH}, log_every: 100,
  checkpoint: {{folder: saved, every: 25, keep: 2, async: ASYNC}}}}
"""


def measured(folder: Path, process: str) -> list[dict[str, int]]:
    """What one process held, from the end of the warm-up to the last step."""
    lines = (folder / f"samples-{process}.jsonl").read_text().splitlines()
    samples: list[dict[str, int]] = [json.loads(line) for line in lines]
    last = max(sample["log"] for sample in samples)
    return [sample for sample in samples if last > sample["log"] > last * WARM / STEPS]


def growth(samples: Sequence[dict[str, int]], held: str) -> int:
    """By how much the most that was held in the last third is more than in the first."""
    third = len(samples) // 3
    parts = (samples[:third], samples[-third:])
    first, last = (max(sample[held] for sample in part) for part in parts)
    return last - first


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_run_holds_does_not_grow_with_its_steps(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "soaked.py").write_text(MODEL)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("ASYNC", str(asynchronous).lower()))
    command = ["-m", "shardwright", "train", "run.yaml", "--devices", "4", "--log-dir", "logs"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for process in ("launcher", "0", "1", "2", "3"):
        samples = measured(tmp_path, process)
        assert len(samples) > 10
        # A checkpoint that is being written has a file and a thread of its own.
        assert all(growth(samples, held) <= 1 for held in ("files", "threads")), process
        assert growth(samples, "groups") == 0, process
        assert growth(samples, "memory") < 4 * 2**20, process
        assert growth(samples, "objects") < 15_000, process
    logs = tmp_path / "logs" / "1"
    steps = (logs / "rank.0" / "steps.jsonl").read_text().splitlines()
    assert len(steps) == STEPS and max(map(len, steps)) < 200
    assert len((logs / "rank.0" / "stdout").read_text().splitlines()) == STEPS // EPOCH
    written = [path for path in logs.rglob("*") if path.name in ("stderr", "stdout")]
    assert not any(path.stat().st_size for path in written if path != logs / "rank.0" / "stdout")
    assert len(list((tmp_path / "saved").iterdir())) == 2

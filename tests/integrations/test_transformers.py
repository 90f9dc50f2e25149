"""`Trainer` with a planned model does what `Trainer` does on one device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integrations.trainer_cases import CASES

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"
TIMES = re.compile(r"runtime|per_second|preparation_time|total_flos")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def run(script: Path, folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> None:
    done = subprocess.run(
        [sys.executable, *launcher, str(script), "--folder", str(folder), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def history(folder: Path, step: int) -> list[dict[str, Any]]:
    state = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
    keys = ("step", "loss", "grad_norm", "eval_loss", "learning_rate")
    return [{key: entry[key] for key in keys if key in entry} for entry in state["log_history"]]


def assert_equal_runs(split: Path, plain: Path, step: int) -> None:
    for mine, wanted in zip(history(split, step), history(plain, step), strict=True):
        assert mine.keys() == wanted.keys()
        torch.testing.assert_close(list(mine.values()), list(wanted.values()), rtol=1e-4, atol=1e-5)
    mine, wanted = (load_file(f / "adapter_model.safetensors") for f in (split, plain))
    torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the same script does with the `Trainer` of transformers, on one device."""
    folder = tmp_path_factory.mktemp("plain")
    text = EXAMPLE.read_text()
    own = "from shardwright.integrations.transformers import ShardwrightTrainer as Trainer"
    assert own in text
    script = folder / "plain.py"
    script.write_text(text.replace(own, "from transformers import Trainer"))
    run(script, folder / "out")
    return folder / "out"


@pytest.mark.distributed
def test_lora_on_four_processes_equals_one_device_and_resumes_on_one(
    plain: Path, tmp_path: Path
) -> None:
    run(EXAMPLE, tmp_path, "--steps", "8", launcher=LAUNCHER)
    assert_equal_runs(tmp_path, plain, 8)
    for path in tmp_path.glob("checkpoint-8/**/*"):
        path.unlink() if path.is_file() else None
    (tmp_path / "adapter_model.safetensors").unlink()
    for path in sorted(tmp_path.glob("checkpoint-8/**"), reverse=True):
        path.rmdir()
    run(EXAMPLE, tmp_path, "--resume")
    assert_equal_runs(tmp_path, plain, 8)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_what_trainer_does_on_one_device_it_does_on_two(case: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("trainer_cases.py")
    for kind, launcher in (("plain", ()), ("planned", (*LAUNCHER[:-1], "2"))):
        command = [sys.executable, *launcher, str(script), kind, case, str(tmp_path / kind)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    mine, wanted = (
        [
            {k: v for k, v in entry.items() if not TIMES.search(k)}
            for entry in json.loads((tmp_path / kind / "log.json").read_text())
        ]
        for kind in ("planned", "plain")
    )
    loose = {"rtol": 2e-2, "atol": 2e-2} if case == "bf16" else {"rtol": 1e-3, "atol": 1e-4}
    assert len(mine) == len(wanted)
    for entry, like in zip(mine, wanted, strict=True):
        assert entry.keys() == like.keys()
        torch.testing.assert_close(list(entry.values()), list(like.values()), **loose)
    states = [load_file(tmp_path / kind / "state.safetensors") for kind in ("planned", "plain")]
    torch.testing.assert_close(*states, **loose)

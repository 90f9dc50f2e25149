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
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaForCausalLM, TrainingArguments

from integrations.trainer_cases import CASES, Sentences, language_model
from shardwright.integrations.transformers import ShardwrightTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"
TIMES = re.compile(r"runtime|per_second|preparation_time|total_flos")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "4")
ACCELERATE += ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
ACCELERATE += ("--main_process_port", "0")


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


def held_in_state(checkpoint: Path) -> set[str]:
    (folder,) = (checkpoint / "shardwright").iterdir()
    return {
        key.partition(".")[0]
        for key in FileSystemReader(folder).read_metadata().state_dict_metadata
    }


def small_trainer(folder: Path, steps: int) -> ShardwrightTrainer:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=2,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
    )
    torch.manual_seed(0)
    return ShardwrightTrainer(language_model(), arguments, train_dataset=Sentences())


def test_a_checkpoint_holds_parameters_once_and_resumes(tmp_path: Path) -> None:
    whole, part = small_trainer(tmp_path / "whole", 4), small_trainer(tmp_path / "part", 2)
    whole.train()
    part.train()
    checkpoint = tmp_path / "part" / "checkpoint-2"
    assert held_in_state(checkpoint) == {"optimizer", "random"}
    read = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    torch.testing.assert_close(dict(read), dict(part.model.state_dict()), rtol=0, atol=0)
    part.args.max_steps = 4
    part.train(resume_from_checkpoint=str(checkpoint))  # Into a model that is planned.
    fresh = small_trainer(tmp_path / "fresh", 4)
    fresh.train(resume_from_checkpoint=str(checkpoint))
    for resumed in (part, fresh):
        torch.testing.assert_close(
            dict(resumed.model.state_dict()), dict(whole.model.state_dict()), rtol=0, atol=0
        )


@pytest.mark.distributed
def test_lora_on_four_processes_equals_one_device_and_resumes_on_one(
    plain: Path, tmp_path: Path
) -> None:
    run(EXAMPLE, tmp_path, "--steps", "8", launcher=LAUNCHER)
    assert_equal_runs(tmp_path, plain, 8)
    assert held_in_state(tmp_path / "checkpoint-4") == {"optimizer", "random"}
    for path in tmp_path.glob("checkpoint-8/**/*"):
        path.unlink() if path.is_file() else None
    (tmp_path / "adapter_model.safetensors").unlink()
    for path in sorted(tmp_path.glob("checkpoint-8/**"), reverse=True):
        path.rmdir()
    run(EXAMPLE, tmp_path, "--resume")
    assert_equal_runs(tmp_path, plain, 8)


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_launch_starts_the_same(plain: Path, tmp_path: Path) -> None:
    run(EXAMPLE, tmp_path, "--steps", "8", launcher=ACCELERATE)
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

"""A tiny LLaMA from files of the MindFormers shape: trained, resumed and adapted."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from mindformers.files import small
from shardwright import cli
from shardwright.errors import CheckpointError, DataError
from shardwright.run.config import Run
from shardwright.run.loop.weights import load_weights

TRAINED = {
    "runner_config": {"epochs": 2, "batch_size": 1},
    "parallel__enable_parallel_optimizer": True,
    "parallel_config__mem_coeff": 16,
    "train_dataset__data_loader__dataset_dir": "story.txt",
    "model__model_config__num_layers": 2,
    "model__model_config__compute_dtype": "float32",
    "lr_schedule": {"type": "CosineWithWarmUpLR", "warmup_steps": 2},
    "optimizer__learning_rate": 1e-2,
    "output_dir": "whole",
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 3}],
}
ADAPTERS = {"pet_type": "lora", "lora_rank": 4, "target_modules": ".*wq|.*wv"}
PREFIX = {"pet_type": "prefixtuning", "prefix_token_num": 8, "mid_dim": 16, "dropout_rate": 0.0}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def written(name: str, **changes: Any) -> Run:
    """The run of a file that is written into the current folder."""
    Path(f"{name}.yaml").write_text(json.dumps(small(**{**TRAINED, **changes})))
    return Run.from_file(f"{name}.yaml").for_devices(2)


@pytest.fixture
def story(run_folder: Path) -> Path:
    """Two epochs of it are 8 steps."""
    text = " ".join(f"{n} birds sang {n * n} songs." for n in range(40))
    (run_folder / "story.txt").write_text(text[: 32 * 4 * 4 + 16])
    return run_folder


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch, story: Path) -> Callable[[str, int], list[float]]:
    """Trains as `shardwright train NAME.yaml` does on so many devices; the losses of its steps."""

    def train(name: str, devices: int) -> list[float]:
        arguments = ["train", f"{name}.yaml", "--devices", str(devices), "--log-dir", f"log_{name}"]
        monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert not caught.value.code
        lines = (story / f"log_{name}" / "1" / "rank.0" / "steps.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    return train


def weights(run: Run, folder: str) -> dict[str, torch.Tensor]:
    net = run.model()
    load_weights(net, folder)
    return net.state_dict()


@pytest.mark.distributed
def test_a_run_goes_on_as_if_it_had_not_stopped_and_is_adapted(
    losses: Callable[[str, int], list[float]],
) -> None:
    whole = written("whole")
    all_steps = losses("whole", 2)
    assert len(all_steps) == 8 and all_steps[-1] < all_steps[0] - 1

    Path("part").mkdir()
    shutil.copytree("whole/step-3", "part/step-3")
    written("part", resume_training=True, load_checkpoint="part")
    assert losses("part", 2) == all_steps[3:]
    base = weights(whole, "whole")
    resumed = weights(whole, "part")
    assert all(torch.equal(base[name], resumed[name]) for name in base)

    tuned = written(
        "tuned",
        run_mode="finetune",
        load_checkpoint="whole",
        output_dir="tuned",
        model__model_config__pet_config=ADAPTERS,
    )
    model = whole.model()
    load_weights(model, "whole")
    steps = losses("tuned", 1)
    assert steps[0] == pytest.approx(model(*tuned.example_batch()).item(), rel=1e-6)
    assert steps[-1] < steps[0]
    adapted = weights(tuned, "tuned")
    frozen = [n for n in adapted if "lora_" not in n]
    assert all(torch.equal(adapted[n], base[n.replace(".base_layer", "")]) for n in frozen)


@pytest.mark.distributed
def test_a_prefix_is_tuned_on_two_devices_as_on_one(
    losses: Callable[[str, int], list[float]],
) -> None:
    base = written("base").model()
    sw.save_state_dict(base, "base.safetensors")
    tuned = {
        "run_mode": "finetune",
        "load_checkpoint": "base.safetensors",
        "model__model_config__pet_config": PREFIX,
        "optimizer__learning_rate": 0.1,
    }
    run = written("two", output_dir="two", **tuned)
    written("one", output_dir="one", **tuned)
    two, one = losses("two", 2), losses("one", 1)
    assert two == pytest.approx(one, rel=1e-5) and two[-1] < two[0]
    saved = weights(run, "two")
    assert all(torch.equal(saved[name], value) for name, value in base.state_dict().items())
    assert saved["prefix_tuning.embedding"].std() > 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_checkpoint": "absent"}, "load_checkpoint: absent: no such file or folder"),
        (
            {"load_checkpoint": "empty", "resume_training": True},
            "resume_training: empty contains no complete checkpoint to resume from\n"
            "set `resume_training` to False, or `load_checkpoint` to the folder of an earlier run",
        ),
    ],
)
def test_what_a_run_should_begin_with_must_be_there(
    changes: dict[str, Any], message: str, story: Path
) -> None:
    run = written("run", **changes)
    with pytest.raises(CheckpointError, match=f"^run.yaml: {message}"):
        run.check_checkpoints()


def test_a_run_may_only_save_its_strategies(
    losses: Callable[[str, int], list[float]], story: Path
) -> None:
    parallel = {"parallel_mode": 2, "full_batch": True, "strategy_ckpt_save_file": "cuts.json"}
    written("cuts", only_save_strategy=True, parallel=parallel)
    with pytest.raises(FileNotFoundError, match=r"steps\.jsonl"):
        losses("cuts", 2)
    assert "lm_head" in (story / "cuts.json").read_text()


def test_a_token_that_the_model_does_not_know_is_an_error(story: Path) -> None:
    run = written("run", model__model_config__vocab_size=64)
    with pytest.raises(
        DataError,
        match="token id 115, but the model's `vocab_size` is 64\nset `vocab_size` to at least 116",
    ):
        len(run.batches)

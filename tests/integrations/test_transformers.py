"""`Trainer` with a planned model does what `Trainer` does on one device."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import shardwright as sw
from forked import python
from integrations import uneven_cases
from integrations.small_trainer_ranks import DECAYING, small_trainer
from integrations.trainer_cases import CASES, Sentences, language_model
from shardwright.integrations.transformers import ShardwrightTrainer
from torchrun import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"
TIMES = re.compile(r"runtime|per_second|preparation_time|total_flos")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "4")
ACCELERATE += ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
ACCELERATE += ("--main_process_port", "0")


def run(script: Path, folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> None:
    if not launcher:
        ended = python(str(script), "--folder", str(folder), *options)
        assert ended.status == 0, ended.errors[0][-3000:]
        return
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


def uneven_losses(cls: type[Trainer], folder: Path, **options: Any) -> list[dict[str, float]]:
    """The losses and gradient norms of a run on sentences of which some tokens have no label."""
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        logging_steps=1,
        learning_rate=0.1,
        optim="sgd",
        report_to="none",
        use_cpu=True,
    )
    torch.manual_seed(0)
    data = {"train_dataset": uneven_cases.Sentences(24), "data_collator": uneven_cases.padded}
    trainer = cls(uneven_cases.Tagger(), arguments, **data, **options)
    trainer.train()
    logs = trainer.state.log_history
    return [{key: log[key] for key in ("loss", "grad_norm")} for log in logs if "loss" in log]


def test_a_plan_with_micro_batches_trains_the_loss_of_the_whole_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = uneven_losses(Trainer, tmp_path)
    plan = {"devices": 1, "micro_batches": 4}
    found = uneven_losses(ShardwrightTrainer, tmp_path, plan=plan)
    assert len(found) == 3
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert "the plan has 4 micro-batches, but `Trainer` calls the model with" in caplog.text


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
    # With `torch.distributed.run`, which the slow tests use, each process would import again.
    printed = torchrun(EXAMPLE, 4, "--folder", str(tmp_path), "--steps", "8")
    assert (tmp_path / "checkpoint-8").is_dir(), printed
    assert_equal_runs(tmp_path, plain, 8)
    assert held_in_state(tmp_path / "checkpoint-4") == {"optimizer", "random"}
    for path in tmp_path.glob("checkpoint-8/**/*"):
        path.unlink() if path.is_file() else None
    (tmp_path / "adapter_model.safetensors").unlink()
    for path in sorted(tmp_path.glob("checkpoint-8/**"), reverse=True):
        path.rmdir()
    run(EXAMPLE, tmp_path, "--resume")
    assert_equal_runs(tmp_path, plain, 8)


@pytest.mark.distributed
def test_a_signal_to_one_rank_ends_all_after_the_same_step_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    script = Path(__file__).with_name("stopped_trainer_ranks.py")
    printed = torchrun(script, 2, str(tmp_path / "stopped"))
    for rank in range(2):
        assert f"rank {rank} ends with 143 after 3\n" in printed, printed
    (checkpoint,) = (tmp_path / "stopped").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-3"
    set_seed(0)
    resumed, whole = (small_trainer(tmp_path / name, 6) for name in ("resumed", "whole"))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    whole.train()
    torch.testing.assert_close(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


@pytest.fixture(scope="module")
def uneven_logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of `Trainer` on one process and of `ShardwrightTrainer` on two, by case."""
    folder, script = tmp_path_factory.mktemp("uneven"), uneven_cases.__file__
    alone = python(script, "plain", str(folder))
    assert alone.status == 0, alone.errors
    printed = torchrun(Path(script), 2, "planned", str(folder))
    assert (folder / "planned.json").exists(), printed
    planned, plain = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("planned", "plain")
    )
    return planned, plain


@pytest.mark.distributed
@pytest.mark.parametrize("case", uneven_cases.CASES)
def test_samples_that_do_not_fill_the_last_batch_count_once(
    uneven_logs: tuple[dict[str, Any], dict[str, Any]], case: str
) -> None:
    logs, wanted_logs = (logs[case] for logs in uneven_logs)
    for log, wanted in zip(logs, wanted_logs, strict=True):
        assert log.keys() == wanted.keys()
        log, wanted = (
            {key: value for key, value in each.items() if not TIMES.search(key)}
            for each in (log, wanted)
        )
        assert log == pytest.approx(wanted, rel=1e-5)


def test_the_loss_of_an_evaluation_is_the_mean_over_all_samples(tmp_path: Path) -> None:
    net, samples = uneven_cases.Tagger(), uneven_cases.Sentences(13)
    batches = [uneven_cases.padded([samples[i] for i in rows]) for rows in (range(8), range(8, 13))]
    losses = [float(net(**batch)["loss"]) for batch in batches]
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=8, report_to="none", use_cpu=True
    )
    trainer = ShardwrightTrainer(net, arguments, data_collator=uneven_cases.padded)
    logged = trainer.evaluate(samples)["eval_loss"]
    assert logged == pytest.approx((8 * losses[0] + 5 * losses[1]) / 13, rel=1e-5)


class ReadOnce(uneven_cases.Stream):
    def __iter__(self) -> Any:
        self.samples = getattr(self, "samples", super().__iter__())
        return self.samples


def test_a_stream_that_can_be_read_once_is_refused_unless_there_is_a_plan(tmp_path: Path) -> None:
    net = uneven_cases.Tagger()
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)

    def train(**options: Any) -> None:
        trainer = ShardwrightTrainer(
            net,
            arguments,
            data_collator=uneven_cases.padded,
            train_dataset=ReadOnce(8),
            **options,
        )
        trainer.train()

    with pytest.raises(sw.ConfigError, match="training would miss the samples"):
        train()
    batch = uneven_cases.padded([uneven_cases.Sentences(8)[index] for index in range(8)])
    train(plan=sw.plan(net, (), batch, devices=1))


def test_a_plan_for_parts_of_batches_is_refused(tmp_path: Path) -> None:
    net = uneven_cases.Tagger()
    batch = uneven_cases.padded([uneven_cases.Sentences(8)[index] for index in range(8)])
    plan = sw.plan(net, (), batch, devices=2, dataset_strategy="data_parallel")
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    trainer = ShardwrightTrainer(
        net,
        arguments,
        data_collator=uneven_cases.padded,
        train_dataset=uneven_cases.Sentences(8),
        plan=plan,
    )
    with pytest.raises(sw.PlanError, match="gives every process the global batch"):
        trainer.train()


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


def resumed_by(cls: type[Trainer], checkpoint: Path, folder: Path) -> dict[str, Any]:
    trainer = small_trainer(folder, 4, cls, **DECAYING)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return dict(trainer.model.state_dict())


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of a plain `Trainer` after 2 of 4 steps, and its model after all."""
    folder = tmp_path_factory.mktemp("plain_run")
    trainer = small_trainer(folder, 4, Trainer, **DECAYING)
    trainer.train()
    return folder / "checkpoint-2", dict(trainer.model.state_dict())


@pytest.mark.distributed
@pytest.mark.parametrize("phase", ["train", "save_on_rank_0"])
def test_a_plain_trainer_resumes_a_run_of_two_ranks_with_its_optimizer_and_schedule(
    phase: str, plain_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("small_trainer_ranks.py")
    printed = torchrun(script, 2, phase, str(tmp_path / "planned"))
    checkpoint = tmp_path / "planned" / "checkpoint-2"
    assert checkpoint.is_dir(), printed
    torch.testing.assert_close(resumed_by(Trainer, checkpoint, tmp_path / "out"), plain_run[1])


@pytest.mark.distributed
def test_two_ranks_resume_the_checkpoint_of_a_plain_trainer(
    plain_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("small_trainer_ranks.py")
    printed = torchrun(script, 2, "resume", str(tmp_path), str(plain_run[0]))
    assert (tmp_path / "checkpoint-4").is_dir(), printed
    state = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4").state_dict()
    torch.testing.assert_close(dict(state), plain_run[1])


def test_a_checkpoint_without_optimizer_is_named_as_one(
    plain_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(plain_run[0], checkpoint)
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(sw.CheckpointError, match="start anew from its weights"):
        resumed_by(ShardwrightTrainer, checkpoint, tmp_path / "out")


def test_processes_that_would_each_train_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sw.ConfigError, match="each would train its own model\npass `use_cpu"):
        ShardwrightTrainer(language_model(), arguments, train_dataset=Sentences())

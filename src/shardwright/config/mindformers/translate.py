"""A file of the MindFormers shape in the keys of Shardwright's own files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.config.load import validated
from shardwright.config.mindformers.model import MindFormersModel
from shardwright.config.mindformers.run import LanguageRun
from shardwright.config.mindformers.training import MindFormersOptimizer, Training
from shardwright.config.schema import Config


def translate_run(run: LanguageRun, devices: int) -> Config:
    """The run on so many devices as a configuration.

    Raises:
        ConfigError: the numbers of the file do not fit `devices`.
    """
    run.check_devices(devices)
    content: dict[str, Any] = {
        "model": _model(run),
        "data": {
            "name": "text",
            "seq_length": run.model.sizes.seq_length,
            "batch_size": run.batch.global_batch(devices),
            "seed": run.training.seed,
        },
        "optimizer": _optimizer(run.training.optimizer),
        "parallel": {
            **_parallel(run),
            **_kept(run),
            **_computed(run.model),
            "memory_limit": run.memory_limit,
            "save_strategies": run.strategy_file or None,
        },
        "train": _train(run.training, run.model.param_dtype),
    }
    if run.dataset:
        content["data"]["path"] = run.dataset
    return validated(content, run.file)


def _model(run: LanguageRun) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sizes": vars(run.model.sizes),
        "arguments": {"attention": run.model.attention},
    }
    if run.model.lora is not None:
        found["lora"] = vars(run.model.lora)
    return found


def _optimizer(optimizer: MindFormersOptimizer) -> dict[str, Any]:
    schedule = {key: value for key, value in vars(optimizer.schedule).items() if key != "peak"}
    return {
        "name": "adamw",
        "learning_rate": optimizer.schedule.peak,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "clip_norm": optimizer.clip_norm,
        "schedule": schedule,
    }


def _parallel(run: LanguageRun) -> dict[str, Any]:
    ways = run.parallelism
    found: dict[str, Any] = {
        "mode": "semi_auto" if ways.by_numbers else ways.mode,
        "strategies": ways.strategies or None,
        "mem_coeff": ways.mem_coeff,
        "stages": ways.stages,
        "schedule": ways.schedule,
        "micro_batches": run.batch.micro_batches(),
        "cluster": ways.cluster or None,
    }
    if ways.auto_pipeline is not None:
        found |= {"stages": "auto"} if ways.auto_pipeline else {"suggest_stages": True}
    if ways.by_numbers:
        found["expert"] = {
            "data_parallel": ways.data_parallel,
            "model_parallel": ways.model_parallel,
            "context_parallel": ways.context_parallel,
            "seq_parallel": ways.seq_parallel,
            "vocab_emb_dp": ways.vocab_emb_dp,
        }
    return found


def _kept(run: LanguageRun) -> dict[str, Any]:
    """What is stored sharded and what is computed again: with gathers that are made again sharded
    parameters are freed after their use."""
    sharding, again = run.parallelism.sharding, run.training.recompute
    found: dict[str, Any] = {}
    if sharding is not None:
        found["hsdp"] = vars(replace(sharding, level="level3") if again.gathers else sharding)
    if again.blocks or again.selective:
        found["recompute"] = {"communication": again.communication}
        if not again.blocks:
            found["recompute"]["operators"] = _selected(run.model)
    return found


def _computed(model: MindFormersModel) -> dict[str, str]:
    """What is stored in single precision may be computed in half of it."""
    if model.param_dtype == "float32" and model.compute_dtype != "float32":
        return {"compute_dtype": model.compute_dtype}
    return {}


def _selected(model: MindFormersModel) -> list[str]:
    """Kinds of operators in a block that are cheap to compute again and large if kept."""
    activation = "sigmoid" if model.sizes.family == "pangualpha" else "silu"
    return [activation, "mul", *(["softmax"] if model.attention == "explicit" else [])]


def _train(training: Training, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "epochs": training.epochs,
        "seed": training.seed,
        "dtype": dtype,
        "resume": training.resume,
        "load": None if training.resume else training.load_checkpoint or None,
    }
    kept = training.checkpoints
    if training.resume:
        found["checkpoint"] = {"folder": training.load_checkpoint}
    if kept is not None:
        found["checkpoint"] = {
            "folder": training.load_checkpoint if training.resume else kept.folder,
            "every": kept.every,
            "keep": kept.keep,
            "async": kept.asynchronous,
        }
    return found

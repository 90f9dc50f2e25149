"""A MindFormers configuration in the keys of Shardwright's own files."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from shardwright.mindformers.model import MindFormersModel
from shardwright.mindformers.run import LanguageRun
from shardwright.mindformers.training import StageBlocks
from shardwright.run.config.load import validated
from shardwright.run.config.schema import Config


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
        "optimizer": run.training.optimizer,
        "parallel": {
            **_parallel(run),
            **_storage_and_recompute(run),
            **_computed(run.model),
            "memory_limit": run.memory_limit,
            "save_strategies": run.strategy_file or None,
        },
        "train": {**run.training.train, "dtype": run.model.param_dtype},
    }
    if run.dataset:
        content["data"]["path"] = run.dataset
    return validated(content, run.file)


def _model(run: LanguageRun) -> dict[str, Any]:
    section: dict[str, Any] = {
        "sizes": vars(run.model.sizes),
        "arguments": {"attention": run.model.attention},
    }
    for name, tuned in vars(run.model.adaptation).items():
        if tuned is not None:
            section[name] = vars(tuned)
    return section


def _parallel(run: LanguageRun) -> dict[str, Any]:
    parallelism = run.parallelism
    section: dict[str, Any] = {
        "mode": "semi_auto" if parallelism.by_numbers else parallelism.mode,
        "strategies": parallelism.strategies or None,
        "mem_coeff": parallelism.mem_coeff,
        "stages": parallelism.stages,
        "schedule": parallelism.schedule,
        "micro_batches": run.batch.micro_batches(),
        "cluster": parallelism.cluster or None,
    }
    if parallelism.auto_pipeline is not None:
        section |= {"stages": "auto"} if parallelism.auto_pipeline else {"suggest_stages": True}
    if parallelism.by_numbers:
        section["expert"] = {
            "data_parallel": parallelism.data_parallel,
            "model_parallel": parallelism.model_parallel,
            "context_parallel": parallelism.context_parallel,
            "expert_parallel": parallelism.expert_parallel,
            "seq_parallel": parallelism.seq_parallel,
            "vocab_emb_dp": parallelism.vocab_emb_dp,
            "layers": list(run.layers),
        }
    return section


def _storage_and_recompute(run: LanguageRun) -> dict[str, Any]:
    """What is stored sharded and what is recomputed: where gathers are repeated, sharded parameters
    are freed after their use."""
    sharding, recompute = run.parallelism.sharding, run.training.recompute
    section: dict[str, Any] = {}
    if sharding is not None:
        section["hsdp"] = vars(replace(sharding, level="level3") if recompute.gathers else sharding)
    if recompute.blocks or recompute.selective:
        whole = _first_blocks(run, recompute.blocks)
        some = [block for block in _first_blocks(run, recompute.selective) if block not in whole]
        section["recompute"] = {"communication": recompute.communication, "blocks": some or whole}
        if some:
            section["recompute"] |= {"operators": _selected(run.model), "whole_blocks": whole}
    return section


def _first_blocks(run: LanguageRun, chosen: StageBlocks) -> list[int]:
    """The blocks, by number, that are chosen of each stage."""
    ends = list(accumulate(run.layers))
    numbers = run.layers if chosen is True else chosen or (0,) * len(ends)
    stages = zip(ends, run.layers, numbers, strict=True)
    return [
        block
        for end, layers, number in stages
        for block in range(end - layers, end - layers + min(number, layers))
    ]


def _computed(model: MindFormersModel) -> dict[str, str]:
    """What is stored in single precision may be computed in half of it."""
    if model.param_dtype == "float32" and model.compute_dtype != "float32":
        return {"compute_dtype": model.compute_dtype}
    return {}


def _selected(model: MindFormersModel) -> list[str]:
    """Kinds of operators in a block that are cheap to recompute and large to save."""
    sizes, softmax = model.sizes, ["softmax"] if model.attention == "explicit" else []
    if sizes.family == "gpt" and sizes.activation != "fast_gelu":
        return ["gelu", *softmax]
    by_sigmoid = "sigmoid" if sizes.positions == "learned" else "silu"
    # The experts of Mixtral are one operator, with their activation.
    return [*([] if sizes.family == "mixtral" else [by_sigmoid]), "mul", *softmax]

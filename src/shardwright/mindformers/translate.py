"""Translate a MindFormers file into a Shardwright configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.mindformers.model import MindFormersModel
from shardwright.mindformers.recomputation import StageBlocks, leading_blocks
from shardwright.mindformers.run import LanguageRun
from shardwright.run.config.load import validate_config
from shardwright.run.config.schema import Config


def translate_run(run: LanguageRun, devices: int) -> Config:
    """Translate a run into a Shardwright configuration for `devices` devices.

    Raises:
        ConfigError: if the parallel degrees of the file do not multiply to `devices`.
    """
    run.check_devices(devices)
    content: dict[str, Any] = {
        "model": _make_model_section(run),
        "data": {
            "name": "text",
            "seq_length": run.model.sizes.seq_length,
            "batch_size": run.batch.global_batch(devices),
            "seed": run.training.seed,
        },
        "optimizer": run.training.optimizer,
        "parallel": {
            **_make_parallel_section(run),
            **_make_memory_options(run),
            **_make_compute_dtype_key(run.model),
            "memory_limit": run.memory_limit,
            # A missing key is "" in `LanguageRun`, and None in a configuration.
            "save_strategies": run.strategy_file or None,
            "save_graphs": run.graphs_folder or None,
        },
        "train": {**run.training.train, "dtype": run.model.param_dtype},
    }
    if run.dataset:
        content["data"]["path"] = run.dataset
    return validate_config(content, run.file)


def _make_model_section(run: LanguageRun) -> dict[str, Any]:
    section: dict[str, Any] = {
        "sizes": vars(run.model.sizes),
        "arguments": {"attention": run.model.attention},
    }
    # Fields of an adaptation are named like the keys of its section.
    for name, adaptation in vars(run.model.adaptation).items():
        if adaptation is not None:
            section[name] = vars(adaptation)
    return section


def _make_parallel_section(run: LanguageRun) -> dict[str, Any]:
    parallelism = run.parallelism
    section: dict[str, Any] = {
        # Degrees are the section `expert`, which needs this mode.
        "mode": "semi_auto" if parallelism.shards_by_degrees else parallelism.mode,
        "strategies": parallelism.strategies or None,
        "mem_coeff": parallelism.mem_coeff,
        "stages": parallelism.stages,
        "schedule": parallelism.schedule,
        "micro_batches": run.batch.micro_batches(),
        "cluster": parallelism.cluster or None,
    }
    if parallelism.auto_pipeline is not None:
        section |= {"stages": "auto"} if parallelism.auto_pipeline else {"suggest_stages": True}
    if parallelism.shards_by_degrees:
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


def _make_memory_options(run: LanguageRun) -> dict[str, Any]:
    sharding, recompute = run.parallelism.sharding, run.training.recompute
    section: dict[str, Any] = {}
    if sharding is not None:
        # Gathering again in the backward pass means that parameters are freed after the forward
        # pass, which is ZeRO stage 3.
        section["hsdp"] = vars(replace(sharding, level="level3") if recompute.gathers else sharding)
    if recompute.blocks or recompute.selective or recompute.operators:
        section["recompute"] = _make_recompute_section(run)
    return section


def _make_recompute_section(run: LanguageRun) -> dict[str, Any]:
    recompute, stages = run.training.recompute, run.parallelism.stages
    fully_recomputed = leading_blocks(run.layers, stages, recompute.blocks)

    def partly_recomputed(blocks: StageBlocks) -> list[int]:
        return [
            each
            for each in leading_blocks(run.layers, stages, blocks)
            # A block that is recomputed fully is in `whole_blocks` only.
            if each not in fully_recomputed
        ]

    section: dict[str, Any] = {"communication": recompute.communication}
    blocks_by_op_type = {
        op_type: partly_recomputed(blocks) for op_type, blocks in recompute.operators.items()
    }
    if any(blocks_by_op_type.values()):
        return section | {"operators": blocks_by_op_type, "whole_blocks": fully_recomputed}
    if selective := partly_recomputed(recompute.selective):
        operators = _list_recomputed_op_types(run.model)
        return section | {
            "blocks": selective,
            "operators": operators,
            "whole_blocks": fully_recomputed,
        }
    # No block is recomputed partly, so the section needs no `whole_blocks`.
    return section | {"blocks": fully_recomputed}


def _make_compute_dtype_key(model: MindFormersModel) -> dict[str, str]:
    """Return {"compute_dtype": value} for mixed precision, float32 parameters with 16-bit matrix
    products; otherwise an empty dict."""
    if model.param_dtype == "float32" and model.compute_dtype != "float32":
        return {"compute_dtype": model.compute_dtype}
    return {}


def _list_recomputed_op_types(model: MindFormersModel) -> list[str]:
    """Return the operator types of selective recomputation: large outputs, cheap to recompute."""
    # Fused attention saves no softmax output.
    sizes, softmax = model.sizes, ["softmax"] if model.attention == "explicit" else []
    if sizes.family == "gpt" and sizes.activation != "fast_gelu":
        return ["gelu", *softmax]
    # fast_gelu(x) is computed as x · sigmoid(1.702 x); the gated activations are SiLU.
    activation = "sigmoid" if sizes.positions == "learned" else "silu"
    # The experts of Mixtral are one operator that includes their activation.
    return [*([] if sizes.family == "mixtral" else [activation]), "mul", *softmax]

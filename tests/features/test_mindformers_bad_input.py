"""Whatever the original checks: one error each, with its place, what was asked and what is valid;
or, where the original only fails, a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mindformers.files import small
from shardwright import cli

SEMI = {"parallel__parallel_mode": 1}
ARCHITECTURES = (
    "LlamaForCausalLM, InternLMForCausalLM, InternLM2ForCausalLM, TelechatForCausalLM,"
    " ChatGLM2ForConditionalGeneration, ChatGLM2WithPtuning2, QwenForCausalLM,"
    " DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, MixtralForCausalLM, Baichuan7BForCausalLM,"
    " Baichuan13BForCausalLM,"
    " Baichuan7BV2ForCausalLM, Baichuan13BV2ForCausalLM, GPT2LMHeadModel, PanguAlphaHeadModel"
)
PANGU = {"model__arch__type": "PanguAlphaHeadModel"}

REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    # Devices, stages and micro-batches.
    "parts that make other devices": (
        SEMI,
        16,
        "parallel_config: data_parallel 4 · model_parallel 2 · context_parallel 1 · pipeline_stage"
        " 1 = 8, but there are 16 devices",
    ),
    "seven devices for an expert": (SEMI, 7, "= 8, but there are 7 devices"),
    "propagation from parts that make other devices": (
        {"parallel__search_mode": "sharding_propagation"},
        16,
        "= 8, but there are 16 devices",
    ),
    "more stages than layers": (
        {"parallel_config__pipeline_stage": 5},
        8,
        "parallel_config.pipeline_stage: 5 stages are more than the 4 layers\nuse at most 4",
    ),
    "fewer micro-batches than stages": (
        {"parallel_config__pipeline_stage": 2},
        8,
        "parallel_config.micro_batch_num: fewer micro-batches than 2 pipeline stages",
    ),
    "stages that do not divide the devices": (
        {"parallel_config__pipeline_stage": 3, "parallel_config__micro_batch_num": 8},
        8,
        "parallel_config.pipeline_stage: 3 stages cannot share 8 devices equally\nuse one of"
        " 1, 2, 4, or set `auto_pipeline: True`",
    ),
    "no part": ({"parallel_config__data_parallel": 0}, 8, "data_parallel: 0 is out of range"),
    "interleaved all at once": (
        {
            "parallel__pipeline_config": {
                "pipeline_interleave": True,
                "pipeline_scheduler": "gpipe",
            }
        },
        8,
        "pipeline_config.pipeline_interleave: True is not supported with gpipe\nset",
    ),
    "an unknown schedule": (
        {"parallel__pipeline_config": {"pipeline_scheduler": "dualpipe"}},
        8,
        "pipeline_scheduler: 'dualpipe' is not supported\nuse one of 1f1b, gpipe, zero_bubble_v",
    ),
    "stages of different sizes": (
        {
            **SEMI,
            "parallel_config__data_parallel": 2,
            "parallel_config__pipeline_stage": 2,
            "parallel_config__micro_batch_num": 2,
            "model__model_config__offset": [1, 1],
        },
        8,
        "model.model_config.offset: [1, 1] does not divide 4 layers over 2 stages\nuse 2 numbers"
        " that add up to 0",
    ),
    "chunks of different sizes": (
        {
            **SEMI,
            "parallel__pipeline_config": {"pipeline_interleave": True},
            "parallel_config__data_parallel": 2,
            "parallel_config__pipeline_stage": 2,
            "parallel_config__micro_batch_num": 2,
            "model__model_config__pp_interleave_num": 2,
            "model__model_config__offset": [[1, -1], [0]],
        },
        8,
        "model.model_config.offset: [[1, -1], [0]] does not divide 4 layers over 2 stages of 2"
        " chunks\nuse 2 lists of 2 numbers that add up to 0",
    ),
    # What an expert cuts.
    "no shard": (
        {"parallel__parallel_optimizer_config": {"optimizer_weight_shard_size": 0}},
        8,
        "optimizer_weight_shard_size: cannot shard over 0 devices\nuse at least 1",
    ),
    "heads that do not divide": (
        {**SEMI, "parallel_config__model_parallel": 3},
        12,
        "parallel_config.model_parallel: num_heads 8 is not divisible by 3\nuse one of 1, 2, 4, 8",
    ),
    "heads of keys that do not divide": (
        {**SEMI, "parallel_config__model_parallel": 8, "model__model_config__n_kv_heads": 4},
        32,
        "model_parallel: n_kv_heads 4 is not divisible by 8\nuse one of 1, 2, 4",
    ),
    "a vocabulary that does not divide, with a whole table": (
        {**SEMI, "model__model_config__vocab_size": 321},
        8,
        "model_parallel: vocab_size 321 is not divisible by 2\nuse one of 1",
    ),
    "a sequence that does not divide": (
        {**SEMI, "parallel_config__context_parallel": 3},
        24,
        "parallel_config.context_parallel: seq_length 32 is not divisible by 3\nuse one of 1, 2,"
        " 4, 8, 16, 32",
    ),
    "sequence parallel that does not divide": (
        {
            **SEMI,
            "parallel_config__use_seq_parallel": True,
            "model__model_config__seq_length": 33,
        },
        8,
        "parallel_config.use_seq_parallel: seq_length 33 is not divisible by context_parallel 1 ·"
        " model_parallel 2\nset it to False, or change `seq_length`",
    ),
    # Modes.
    "hybrid parallel": (
        {"parallel__parallel_mode": 3},
        8,
        "parallel.parallel_mode: 3 (hybrid parallel) is not supported\nuse 0 (data"
        " parallel), 1 (semi-auto) or 2 (auto)",
    ),
    "an unknown mode": ({"parallel__parallel_mode": "best"}, 8, "'best' is not supported\nuse 0"),
    "an unknown search": (
        {"parallel__search_mode": "best"},
        8,
        "parallel.search_mode: 'best' is not supported\nuse one of recursive_programming",
    ),
    "two searches": (
        {
            "parallel__search_mode": "recursive_programming",
            "parallel__auto_parallel_search_mode": "sharding_propagation",
        },
        8,
        "search_mode: recursive_programming conflicts with its old name auto_parallel_search_mode",
    ),
    "no weight of memory": (
        {"parallel_config__mem_coeff": 0},
        8,
        "parallel_config.mem_coeff: 0 is neither a positive number nor 'auto'",
    ),
    "a chosen weight without a limit": (
        {"parallel_config__mem_coeff": "auto"},
        8,
        "mem_coeff='auto' needs a memory limit",
    ),
    "neither True nor False": (
        {"parallel__auto_pipeline": "yes"},
        8,
        "parallel.auto_pipeline: 'yes' is not a boolean\nset it to True or False",
    ),
    "a section that is none": (
        {"parallel_config": [8]},
        8,
        "parallel_config: [8] is not a mapping",
    ),
    "two files of strategies": (
        {
            "parallel__strategy_ckpt_save_file": "a.json",
            "parallel__strategy_ckpt_config": {"save_file": "b.json"},
        },
        8,
        "strategy_ckpt_config.save_file: b.json conflicts with strategy_ckpt_save_file a.json",
    ),
    "strategies and nowhere to save them": (
        {"only_save_strategy": True},
        8,
        "only_save_strategy: True needs the path of the file to write\nset `parallel.",
    ),
    "a file of strategies that is missing": (
        {"parallel__strategy_ckpt_load_file": "absent.json"},
        8,
        "absent.json: no such file",
    ),
    "strategies for a mode that takes none": (
        {"parallel__strategy_ckpt_load_file": "a.json", "parallel__parallel_mode": 0},
        8,
        "parallel.strategy_ckpt_load_file: the mode is data_parallel, which does not use",
    ),
    "recomputation of more stages than there are": (
        {"recompute_config__select_recompute": [2, 1]},
        8,
        "recompute_config.select_recompute: [2, 1] does not fit 1 stages",
    ),
    "experts in parts that do not divide them": (
        {**SEMI, "moe_config__expert_num": 6, "parallel_config__expert_parallel": 4},
        8,
        "parallel_config.expert_parallel: 4 does not divide expert_num 6",
    ),
    "experts of a model that has none": (
        {**PANGU, "moe_config__expert_num": 8},
        8,
        "moe_config.expert_num: 8 experts are not supported for pangualpha\nset it to 1",
    ),
    "experts that are chosen in groups": (
        {"moe_config__expert_num": 8, "moe_config__topk_method": "group_limited_greedy"},
        8,
        "moe_config.topk_method: Mixtral and Qwen do not route to groups",
    ),
    # The model.
    "an unknown model": (
        {"model__arch__type": "GPT"},
        8,
        f"model.arch.type: 'GPT' is not supported\nuse one of {ARCHITECTURES}",
    ),
    "a model of images": (
        {"model__arch__type": "QwenVL"},
        8,
        "model.arch.type: QwenVL reads images, but only causal language models on text are"
        " supported",
    ),
    "a model of labels": (
        {"model__arch__type": "GPT2ForSequenceClassification"},
        8,
        "GPT2ForSequenceClassification is trained on a label of each text, but only causal",
    ),
    "no model": (
        {"model": None},
        8,
        f"model.arch.type: the key is missing\nuse one of {ARCHITECTURES}",
    ),
    "a configuration of another model": (
        {"model__model_config__type": "QwenConfig"},
        8,
        "model.model_config.type: QwenConfig is not the configuration of LlamaForCausalLM",
    ),
    "a size that is missing": (
        {"model__model_config__num_layers": None},
        8,
        "model.model_config.num_layers: the key is missing",
    ),
    "a width that is not divisible into heads": (
        {"model__model_config__num_heads": 7},
        8,
        "model.model_config: hidden_size=64 is not divisible by num_heads=7",
    ),
    "channels of other heads": (
        {
            "model__arch__type": "QwenForCausalLM",
            "model__model_config__kv_channels": 16,
        },
        8,
        "model.model_config.kv_channels: 16 · num_heads 8 is not equal to hidden_size 64",
    ),
    "a part of a layer": (
        {"model__model_config__num_layers": 3.5},
        8,
        "model.model_config.num_layers: 3.5 is not an integer\nset it to an integer",
    ),
    "labels that are ignored otherwise": (
        {"model__model_config__ignore_token_id": 0},
        8,
        "model.model_config.ignore_token_id: the loss ignores only the label -100",
    ),
    "an unknown dtype": (
        {"model__model_config__compute_dtype": "int8"},
        8,
        "compute_dtype: 'int8' is not supported\nuse one of float32, float16, bfloat16",
    ),
    "positions that are stretched": (
        {"model__model_config__extend_method": "DYNAMIC_NTK"},
        8,
        "extend_method: 'DYNAMIC_NTK' is not supported\nuse one of None, NTK, PI, LLAMA3, YARN",
    ),
    "half of a head rotated": (
        {"model__model_config__rotary_pct": 0.5},
        8,
        "model.model_config.rotary_pct: 0.5 is not supported\nset it to 1.0",
    ),
    "everything dropped": (
        {**PANGU, "model__model_config__hidden_dropout_rate": 1.5},
        8,
        "model_config.hidden_dropout_rate: 1.5 is out of range",
    ),
    "two rates of dropout": (
        {
            **PANGU,
            "model__model_config__hidden_dropout_rate": 0.0,
            "model__model_config__attention_dropout_rate": 0.2,
        },
        8,
        "dropout rates differ: hidden_dropout_rate 0, attention_dropout_rate 0.2",
    ),
    "an unknown adapter": (
        {"model__model_config__pet_config": {"pet_type": "prefix"}},
        8,
        "pet_config.pet_type: 'prefix' is not supported\nuse one of lora, prefixtuning, ptuning2",
    ),
    "a prefix without a length": (
        {"model__model_config__pet_config": {"pet_type": "prefixtuning", "mid_dim": 8}},
        8,
        "model.model_config.pet_config.prefix_token_num: the key is missing",
    ),
    "a prefix of a model that takes none": (
        {
            "model__arch__type": "Baichuan7BV2ForCausalLM",
            "model__model_config__pet_config": {"pet_type": "ptuning2"},
        },
        8,
        "model: prefix: Baichuan does not support prefix tuning",
    ),
    "a prefix of another architecture": (
        {"model__model_config__pre_seq_len": 8},
        8,
        "model.model_config.pre_seq_len: the key needs the architecture ChatGLM2WithPtuning2",
    ),
    "adapters that are frozen": (
        {"model__model_config__pet_config": {"freeze_include": ["*lora*"]}},
        8,
        "model.model_config.pet_config.freeze_include: this key is not supported\nremove it",
    ),
    "weights that are three layers here": (
        {"model__model_config__pet_config": {"freeze_exclude": ["*w_qkv*"]}},
        8,
        "freeze_exclude: '*w_qkv*' matches a merged layer that Shardwright splits into three\nuse",
    ),
    "biases of a model without": (
        {**PANGU, "model__model_config__qkv_has_bias": True},
        8,
        "model_config.qkv_has_bias: pangualpha has no QKV biases",
    ),
    "nothing to adapt": (
        {"model__model_config__pet_config": {"target_modules": ".*nothing"}},
        8,
        "use target modules of this model: down_proj, gate_proj, k_proj, lm_head, o_proj",
    ),
    # Training.
    "a number that is text": (
        {"parallel_config__data_parallel": "eight"},
        8,
        "parallel_config.data_parallel: 'eight' is not a number\nset it to a number",
    ),
    "a size of memory without a unit": (
        {"context__max_device_memory": "58"},
        8,
        "context.max_device_memory: '58' is not a memory size\nset it to a size such as 58GB",
    ),
    "positions that begin anew inside a sample": (
        {"train_dataset__eod_reset": True},
        8,
        "train_dataset.eod_reset: Shardwright cannot reset positions and attention",
    ),
    "an empty batch": ({"runner_config__batch_size": 0}, 8, "batch_size: 0 is out of range"),
    "a learning rate that grows with the devices": (
        {"lr_scale": True},
        8,
        "lr_scale: learning rates per layer are not supported",
    ),
    "a schedule that begins below nothing": (
        {"lr_schedule": {"type": "linear", "warmup_lr_init": -1e-5}},
        8,
        "lr_schedule.warmup_lr_init: -1e-05 is out of range\nset a number at least 0",
    ),
    "no learning rate": (
        {"optimizer__learning_rate": None},
        8,
        "optimizer.learning_rate: the key is missing",
    ),
    "a learning rate of nothing": (
        {"optimizer__learning_rate": 0},
        8,
        "optimizer.learning_rate: 0 is out of range",
    ),
    "an unknown optimizer": (
        {"optimizer__type": "Lion"},
        8,
        "optimizer.type: 'Lion' is not supported\nuse one of FP32StateAdamWeightDecay, ",
    ),
    "one beta": (
        {"optimizer__betas": 0.9},
        8,
        "optimizer.betas: 0.9 are not two numbers",
    ),
    "a beta that is too large": (
        {"optimizer__betas": [0.9, 1.5]},
        8,
        "optimizer.betas[1]: 1.5 is out of range",
    ),
    "betas twice": (
        {"optimizer__betas": [0.9, 0.95], "optimizer__beta1": 0.9},
        8,
        "optimizer.betas: `betas` conflicts with `beta1` and `beta2`",
    ),
    "gradients clipped to nothing": (
        {"runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 0}},
        8,
        "runner_wrapper.max_grad_norm: 0 is out of range",
    ),
    "an unknown schedule of the rate": (
        {"lr_schedule__type": "Step"},
        8,
        "lr_schedule.type: 'Step' is not supported\nuse one of CosineWithWarmUpLR, ",
    ),
    "two lengths of the rise": (
        {"lr_schedule": {"warmup_ratio": 0.1, "warmup_steps": 5}},
        8,
        "lr_schedule.warmup_ratio: 0.1 conflicts with warmup_steps 5\nremove one",
    ),
    "a mode that trains nothing": (
        {"run_mode": "predict"},
        8,
        "run_mode: 'predict' is not supported\nuse one of train, finetune",
    ),
    "nothing to go on from": (
        {"resume_training": True},
        8,
        "resume_training: True needs a checkpoint to resume from\nset `load_checkpoint`",
    ),
    "callbacks that are no list": (
        {"callbacks": "all"},
        8,
        "callbacks: 'all' is not a list\nset for",
    ),
    "no device": ({}, 0, "devices=0: must be a whole number of at least 1"),
}

OF_THE_PLAN = (
    "no device",
    "a chosen weight without a limit",
    "a file of strategies that is missing",
)
"""Mistakes that no single file makes, or another one than that of the run."""

PLANNED: dict[str, tuple[dict[str, Any], int]] = {
    "seven devices": ({}, 7),
    "twelve devices": ({}, 12),
    "seven devices, each with its own batch": ({"parallel__parallel_mode": 0}, 7),
    "six devices in two stages": (
        {"parallel_config__pipeline_stage": 2, "parallel_config__micro_batch_num": 2},
        6,
    ),
    "heads that do not divide": ({"parallel_config__model_parallel": 3}, 8),
    "no numbers at all": ({"parallel_config": None}, 8),
    "numbers that are text": ({"optimizer__eps": "1e-8", "parallel_config__data_parallel": "4"}, 8),
    "propagation": ({"parallel__search_mode": "sharding_propagation"}, 8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad_input")


def planned(
    folder: Path,
    text: str,
    devices: int | str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `shardwright plan`; JSON is YAML."""
    monkeypatch.chdir(folder)
    (folder / "run.yaml").write_text(text)
    arguments = ["shardwright", "plan", "run.yaml", "--devices", str(devices)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_error_with_its_place_and_what_is_valid(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes, devices, message = REFUSED[name]
    text = json.dumps(small(**changes))
    status, out, err = planned(folder, text, devices, monkeypatch, capsys)
    error, *remedy = (line for line in err.splitlines() if line.startswith("error: "))
    assert (status, out) == (2, "")
    assert message in err.replace("\n  ", "\n") and len(remedy) <= 1
    assert error.startswith("error: run.yaml: ") == (name not in OF_THE_PLAN)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "runner_config: {}\ntrain_dataset_task: {dataset_config: *train_dataset}\n",
            "line 2, column 38: *train_dataset has no anchor: write &train_dataset before the value"
            " that it refers to",
        ),
        (
            "parallel_config: {data_parallel: 1, data_parallel: 2}\n",
            "line 1, column 37: duplicate key 'data_parallel'",
        ),
        ("parallel_config: {data_parallel: 1\nmodel: {\n", "line 2, column 6: expected ',' or '}'"),
        ("parallel_config:\n\tdata_parallel: 1\n", "line 2, column 1: found character '\\t'"),
        ("", "the configuration must be a mapping, not nothing; use the keys model, loss, "),
    ],
)
def test_what_is_no_file_of_keys_is_one_error_with_its_line(
    text: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = planned(folder, text, 8, monkeypatch, capsys)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: run.yaml: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("changes", "devices"), PLANNED.values(), ids=PLANNED)
def test_what_the_original_refuses_or_cannot_divide_is_planned(
    changes: dict[str, Any],
    devices: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = json.dumps(small(**changes))
    status, out, _ = planned(folder, text, devices, monkeypatch, capsys)
    assert status == 0
    assert f"Plan for {devices} devices" in out

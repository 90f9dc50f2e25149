"""Files with every key that the published ones have, small: all commands take them as they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright import cli
from shardwright.run.config import Run

FILE = """
seed: 3
output_dir: kept
load_checkpoint: ''
src_strategy_path_or_dir: ''
auto_trans_ckpt: False
only_save_strategy: False
resume_training: False
run_mode: train
trainer: {type: SomeTrainer, model_name: small}
do_eval: False
eval_step_interval: -1
eval_epoch_interval: 7
runner_config:
  {epochs: 2, batch_size: 1, sink_mode: True, sink_size: 2, gradient_accumulation_steps: 2}
optimizer:
  {type: FP32StateAdamWeightDecay, beta1: 0.9, beta2: 0.95, eps: 1e-8, learning_rate: 1.e-4,
   weight_decay: 0.1}
lr_schedule:
  {type: CosineWithWarmUpLR, learning_rate: 1e-4, lr_end: 0, warmup_ratio: 0.1, total_steps: -1}
train_dataset: &train
  data_loader: {type: SomeData, dataset_dir: "", shuffle: True}
  input_columns: [input_ids]
  output_columns: [input_ids]
  num_parallel_workers: 2
  python_multiprocessing: False
  drop_remainder: True
  batch_size: 3
  repeat: 1
  numa_enable: False
  prefetch_size: 1
  eod_reset: False
train_dataset_task: {type: SomeTask, dataset_config: *train}
eval_dataset: &eval {data_loader: {type: SomeData, dataset_dir: ""}, batch_size: 3}
eval_dataset_task: {type: SomeTask, dataset_config: *eval}
use_parallel: True
parallel:
  parallel_mode: 2
  gradients_mean: False
  loss_repeated_mean: True
  enable_alltoall: False
  full_batch: True
  search_mode: recursive_programming
  enable_parallel_optimizer: True
  parallel_optimizer_config: {gradient_accumulation_shard: False, parallel_optimizer_threshold: 1}
  strategy_ckpt_save_file: strategy.ckpt
  strategy_ckpt_config: {save_file: strategy.ckpt, only_trainable_params: False}
parallel_config:
  mem_coeff: 0.5
  data_parallel: 8
  model_parallel: 1
  context_parallel: 1
  expert_parallel: 1
  pipeline_stage: 1
  micro_batch_num: 1
  seq_split_num: 1
  use_seq_parallel: False
  vocab_emb_dp: True
  gradient_aggregation_group: 4
micro_batch_interleave_num: 1
moe_config: {expert_num: 1, capacity_factor: 1.1, aux_loss_factor: 0.1, num_experts_chosen: 1}
recompute_config:
  recompute: True
  select_recompute: False
  parallel_optimizer_comm_recompute: False
  mp_comm_recompute: True
  recompute_slice_activation: True
callbacks:
  - {type: SomeMonitor}
  - type: CheckpointMonitor
    prefix: small
    save_checkpoint_steps: 10
    keep_checkpoint_max: 2
    integrated_save: False
    async_save: False
eval_callbacks: [{type: SomeMonitor}]
context:
  mode: 0
  device_target: Ascend
  enable_graph_kernel: False
  max_call_depth: 99
  max_device_memory: "1GB"
  save_graphs: False
  save_graphs_path: graph
  device_id: 0
  jit_config: {jit_level: O1}
  memory_optimize_level: O0
  ascend_config: {precision_mode: must_keep_origin_dtype}
model:
  arch: {type: LlamaForCausalLM}
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 32
    hidden_size: 64
    num_layers: 2
    num_heads: 8
    n_kv_heads: 4
    vocab_size: 320
    multiple_of: 16
    ffn_dim_multiplier: 1.3
    rms_norm_eps: 1.0e-5
    bos_token_id: 1
    eos_token_id: 2
    pad_token_id: 0
    ignore_token_id: -100
    compute_dtype: float16
    layernorm_compute_type: float32
    softmax_compute_type: float16
    rotary_dtype: float16
    param_init_type: float32
    use_past: False
    scaling_factor: 1.0
    extend_method: "None"
    use_flash_attention: True
    qkv_concat: False
    fine_grain_interleave: 2
    offset: 0
    emb_dropout_prob: 0.0
    rotary_pct: 1.0
    rotary_emb_base: 10000
    kv_channels: 8
    is_dynamic: False
    block_size: 16
    num_blocks: 512
    checkpoint_name_or_path: ""
    repetition_penalty: 1
    max_decode_length: 64
    top_k: 3
    top_p: 1
    temperature: 1.0
    do_sample: False
processor: {return_tensors: ms, tokenizer: {unk_token: '<unk>', type: T}, type: P}
metric: {type: SomeMetric}
runner_wrapper:
  type: SomeWrapper
  scale_sense: {type: Dynamic, loss_scale_value: 65536, scale_factor: 2, scale_window: 1000}
  use_clip_grad: True
auto_tune: False
filepath_prefix: tuned
autotune_per_step: 10
profile: False
profile_start_step: 1
profile_stop_step: 10
init_start_profile: False
profile_communication: False
profile_memory: True
layer_scale: False
layer_decay: 0.65
lr_scale_factor: 256
remote_save_url: "a place"
"""
STAGES = {
    "  search_mode": "  auto_pipeline: False\n  search_mode",
    "data_parallel: 8": "data_parallel: 2",
    "  model_parallel: 1": "  model_parallel: 2",
    "pipeline_stage: 1": "pipeline_stage: 2",
    "micro_batch_num: 1": "micro_batch_num: 4",
    "use_seq_parallel: False": "use_seq_parallel: True",
    "vocab_emb_dp: True": "vocab_emb_dp: False",
}
"""What the published file of the largest model says otherwise."""

UNUSED = """
src_strategy_path_or_dir auto_trans_ckpt trainer.type do_eval
eval_step_interval eval_epoch_interval runner_config.sink_mode runner_config.sink_size
train_dataset.data_loader.type train_dataset.data_loader.shuffle train_dataset.input_columns
train_dataset.output_columns train_dataset.num_parallel_workers
train_dataset.python_multiprocessing train_dataset.drop_remainder train_dataset.repeat
train_dataset.numa_enable train_dataset.prefetch_size train_dataset_task
eval_dataset eval_dataset_task parallel.gradients_mean parallel.loss_repeated_mean
parallel.enable_alltoall parallel.strategy_ckpt_config.only_trainable_params
parallel_config.seq_split_num parallel_config.gradient_aggregation_group
moe_config.capacity_factor moe_config.aux_loss_factor moe_config.num_experts_chosen
recompute_config.recompute_slice_activation eval_callbacks context.mode context.device_target
context.enable_graph_kernel context.max_call_depth
context.device_id context.jit_config context.memory_optimize_level context.ascend_config
model.model_config.batch_size model.model_config.bos_token_id model.model_config.eos_token_id
model.model_config.pad_token_id model.model_config.kv_channels
model.model_config.layernorm_compute_type
model.model_config.softmax_compute_type model.model_config.rotary_dtype
model.model_config.use_past model.model_config.scaling_factor model.model_config.qkv_concat
model.model_config.fine_grain_interleave model.model_config.offset model.model_config.is_dynamic
model.model_config.block_size model.model_config.num_blocks
model.model_config.checkpoint_name_or_path model.model_config.repetition_penalty
model.model_config.max_decode_length model.model_config.top_k model.model_config.top_p
model.model_config.temperature model.model_config.do_sample processor metric runner_wrapper.type
runner_wrapper.scale_sense auto_tune filepath_prefix autotune_per_step profile profile_start_step
profile_stop_step init_start_profile profile_communication profile_memory layer_decay
lr_scale_factor remote_save_url
"""

Command = Callable[..., tuple[str, str]]


@pytest.fixture(params=["one stage", "two stages"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = FILE
    if request.param == "two stages":
        for said, otherwise in STAGES.items():
            assert text.count(said) == 1, said
            text = text.replace(said, otherwise)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    return "run.yaml"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """What `shardwright` prints and says in this process, where it succeeds."""

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        assert not caught.value.code, output.err
        return output.out, output.err

    return run


def test_keys_that_mean_nothing_are_those_and_no_others(file: str) -> None:
    foreign = Run.from_file(file).foreign
    assert foreign is not None
    assert sorted(foreign.unused) == sorted(UNUSED.split())


def test_every_command_takes_it_with_all_options(file: str, command: Command) -> None:
    out, err = command("plan", file, "--devices", "8")
    assert "Plan for 8 devices" in out
    assert err.count(f"{file}: {len(UNUSED.split())} keys are ignored: ") == 1
    options = ["--devices", "8", "--cluster", "h100", "--log-costs", "--mem-coeff"]
    kept = ["--json", "--out", "kept/plan.json", "--save-graphs", "graphs"]
    out, _ = command("plan", file, *options, "auto", *kept)
    assert json.loads(out)["cuts"] == json.loads(Path("kept/plan.json").read_text())["cuts"]
    assert Path("graphs/2_plan.txt").is_file()
    out, _ = command("explain", file, "model.layers.1.mlp.up_proj", *options, "4")
    assert out.startswith("model.layers.1.mlp.up_proj: aten.linear")
    out, _ = command("tune", file, "--devices", "8", "--cluster", "h100", "--json")
    assert json.loads(out)["best"] is not None

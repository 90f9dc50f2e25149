"""Reads mutated files through the command line, and counts how it ended.

`python -m features.fuzzed_files KIND FIRST COUNT` prints the counts as JSON, and the traceback of
each seed that ended in neither success nor an error of ours.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from mutations import json_text, mutated, yaml_text
from shardwright import cli

SECONDS = 20.0
"""What reading one file may take of the processor; it takes less than one."""

MEMORY = 16 * 2**30
"""Bytes of addresses of the process."""

MODEL = """
import torch
from torch import nn

def data(samples=16):
    return torch.randn(samples, 8), torch.randint(4, (samples,))

class Perceptron(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(width, 4)

    def forward(self, x):
        return self.second(self.dropout(torch.relu(self.first(x))))

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 10, 3)

    def forward(self, x):
        return self.convolution(x).amax((2, 3))
"""

TARGET = """
model: {target: "fuzzed_model:Perceptron", arguments: {width: 8, dropout: 0.1}}
loss: cross_entropy
data: {target: "fuzzed_model:data", arguments: {samples: 16}, batch_size: 8, seed: 3}
optimizer:
  name: adamw
  learning_rate: 1e-3
  betas: [0.9, 0.99]
  weight_decay: 0.1
  clip_norm: 1.0
  schedule: {kind: cosine, warmup_steps: 3, total_steps: 10}
parallel:
  mem_coeff: 0.1
  cluster: cluster.yaml
  memory_limit: 1GB
  micro_batches: 2
  recompute: {modules: [net.first]}
  hsdp: {level: level2, shard_size: -1, threshold: 0}
train: {epochs: 1, steps: 5, dtype: float32, checkpoint: {folder: saved, every: 2, keep: 1}}
"""

IMAGES = """
model: {target: "fuzzed_model:Images"}
data: {name: digits, image_size: 8, batch_size: 16}
"""

NAMED = """
model:
  name: llama2_7b_tiny
  arguments: {num_layers: 1, attention: fused}
  lora: {target_modules: [q_proj, v_proj], rank: 4, alpha: 8, dropout: 0.1}
data: {name: text, seq_length: 16, batch_size: 4}
parallel:
  mode: semi_auto
  expert: {data_parallel: 2, model_parallel: 1, seq_parallel: false}
  recompute: {operators: [linear]}
"""

SIZES = """
model:
  sizes:
    family: pangualpha
    hidden_size: 16
    num_layers: 2
    num_heads: 2
    num_kv_heads: 2
    intermediate_size: 32
    vocab_size: 320
    seq_length: 16
    norm_eps: 1e-5
    positions: learned
    dropout: 0.1
data: {name: text, seq_length: 8, batch_size: 2}
train: {dtype: bfloat16, load: weights.pt}
"""

TRANSFORMERS = """
model:
  hf: {model_type: gpt2, n_layer: 1, n_embd: 16, n_head: 2, vocab_size: 320, n_positions: 16}
  arguments: {attention: fused}
data: {name: text, seq_length: 8, batch_size: 2}
parallel: {mode: data_parallel, compute_dtype: bfloat16}
"""

MINDFORMERS = """
seed: 0
run_mode: train
runner_config: {epochs: 1, batch_size: 2, sink_mode: true}
optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.e-8, learning_rate: 1.e-5}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 1.e-5, warmup_ratio: 0.03}
use_parallel: true
parallel: {parallel_mode: 1, full_batch: true, search_mode: sharding_propagation}
parallel_config: {data_parallel: 2, model_parallel: 1, pipeline_stage: 1, micro_batch_num: 1}
recompute_config: {recompute: false}
model:
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 16
    hidden_size: 32
    num_layers: 1
    num_heads: 2
    vocab_size: 320
    multiple_of: 16
    rms_norm_eps: 1.0e-6
  arch: {type: LlamaForCausalLM}
"""

CLUSTER = """
name: lab
device:
  memory: 24 GB
  rates: {bfloat16: 165 TFLOP/s, float32: 82 TFLOP/s}
  memory_bandwidth: 1008 GB/s
  matrix_efficiency: 70%
  memory_efficiency: 85%
  overhead: 4 us
levels:
  - {name: PCIe, devices: 2, bandwidth: 25 GB/s, latency: 5 us}
  - {name: Ethernet, devices: 8, bandwidth: 3 GB/s, latency: 20 us, collectives: gloo}
"""

STRATEGIES = {
    "version": 1,
    "layouts": {"layout": {"device_matrix": [2], "alias_names": ["dp"]}},
    "strategies": {
        "net.first": {"in_strategy": [[2, 1], {"layout": ["None", "None"]}]},
        "net.second": {"in_strategy": [[1, 2], None], "parameter_plan": {"weight": [1, 2]}},
        "net.relu": {"in_strategy": [{"layout": ["dp", "None"]}]},
    },
}

STRATEGIES_RUN = """
model: {target: "fuzzed_model:Perceptron"}
data: {target: "fuzzed_model:data", batch_size: 8}
parallel: {mode: sharding_propagation, strategies: fuzzed.json}
"""


@dataclass(frozen=True)
class Fuzzed:
    """A kind of file: examples to mutate, and what reads one.

    Args:
        suffix: of its name.
        dump: writes its plain data.
        examples: that are mutated in turn.
        read: reads the file of this path and does all that a command does with it; raises
            `ShardwrightError` if the file is refused.
    """

    suffix: str
    dump: Callable[[Any], str]
    examples: Callable[[], tuple[str | bytes, ...]]
    read: Callable[[Path], None]


def _run(*arguments: str) -> None:
    """The command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["shardwright", *arguments]
    status: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as done:
            status = done.code
    printed = out.getvalue() + err.getvalue()
    printed.encode()
    assert "Traceback" not in printed, printed
    if status == 2:
        assert "error: " in err.getvalue(), printed
        raise sw.ShardwrightError(err.getvalue())
    assert status in (0, None, 1), (status, printed)


@cache
def plan_examples() -> tuple[str, ...]:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    net = sw.WithLoss(net, torch.nn.CrossEntropyLoss())
    batch = (torch.randn(8, 8), torch.randint(4, (8,)))
    sw.recompute(net.net[0])
    options: dict[str, Any] = {"hsdp": {"threshold": 0}, "cluster": "h100", "micro_batches": 2}
    plan = sw.plan(net, batch, devices=4, stages=2, **options)
    return (plan.to_json(memory=True), sw.plan(net, batch, devices=2).to_json())


def _read_plan(path: Path) -> None:
    _run("diff", str(path), "plan.json", "--every")
    plan = sw.Plan.load(path)
    for text in (
        str(plan),
        plan.text(full=True),
        plan.text(every=True),
        plan.dump(),
        plan.to_json(),
    ):
        text.encode()
    for row in plan.operators:
        plan.explain(row.name).encode()
    plan.report(path.with_suffix(".html"))
    assert sw.Plan.from_json(plan.to_json()) == plan


KINDS: Mapping[str, Fuzzed] = {
    "config": Fuzzed(
        "yaml",
        yaml_text,
        lambda: (TARGET, NAMED, SIZES, TRANSFORMERS, IMAGES, MINDFORMERS),
        lambda path: _run("plan", str(path), "--devices", "2"),
    ),
    "plan": Fuzzed("json", json_text, plan_examples, _read_plan),
    "cluster": Fuzzed(
        "yaml",
        yaml_text,
        lambda: (CLUSTER,),
        lambda path: _run("plan", "strategies.yaml", "--devices", "4", "--cluster", str(path)),
    ),
    "strategies": Fuzzed(
        "json",
        json_text,
        lambda: (json_text(STRATEGIES),),
        lambda path: _run("plan", "with_strategies.yaml", "--devices", "2"),
    ),
}


@dataclass
class Endings:
    """How reading ended: counts, and the traceback of each seed that ended otherwise."""

    success: int = 0
    refused: int = 0
    raw: dict[int, str] = field(default_factory=dict)


def fuzz(
    kind: str,
    seeds: range,
    folder: Path,
    mutate: bool = True,
    kinds: Mapping[str, Fuzzed] | None = None,
) -> Endings:
    """Reads a mutated file of this kind for each seed; works in `folder`."""
    fuzzed, endings = (KINDS if kinds is None else kinds)[kind], Endings()
    (folder / "fuzzed_model.py").write_text(MODEL)
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "with_strategies.yaml").write_text(STRATEGIES_RUN)
    plain = "\n".join(line for line in STRATEGIES_RUN.splitlines() if "parallel" not in line)
    (folder / "strategies.yaml").write_text(plain)
    examples = fuzzed.examples()
    (folder / "plan.json").write_text(plan_examples()[0])
    path = folder / f"fuzzed.{fuzzed.suffix}"
    for seed in seeds:
        text = examples[seed % len(examples)]
        content = text.encode() if isinstance(text, str) else text
        path.write_bytes(mutated(content, seed, fuzzed.dump) if mutate else content)
        try:
            with limited_time():
                fuzzed.read(path)
            endings.success += 1
        except sw.ShardwrightError:
            endings.refused += 1
        except Exception:
            endings.raw[seed] = traceback.format_exc()
            print(kind, seed, endings.raw[seed], file=sys.stderr, flush=True)
    return endings


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s of CPU time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main_of(kinds: Mapping[str, Fuzzed], kind: str, first: str, count: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        seeds = range(int(first), int(first) + int(count))
        endings = fuzz(kind, seeds, Path(name), kinds=kinds)
    print(json.dumps(vars(endings)))


if __name__ == "__main__":
    main_of(KINDS, *sys.argv[1:])

"""Models that are far larger than the memory that planning them takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PLAN_13B = """
import json, resource, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import shardwright as sw

started = time.perf_counter()
with sw.no_init_parameters():
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000,
            hidden_size=5120,
            intermediate_size=13824,
            num_hidden_layers=40,
            num_attention_heads=40,
            num_key_value_heads=40,
        )
    )
ids = torch.zeros(8, 4096, dtype=torch.long, device="meta")
plan = sw.plan(net, (), dict(input_ids=ids, labels=ids, use_cache=False), devices=8)
print(
    json.dumps(
        {
            "parameters": sum(p.numel() for p in net.parameters()),
            "cuts": sum(bool(cuts) for cuts in plan.cuts.values()),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "seconds": time.perf_counter() - started,
        }
    )
)
"""


@pytest.mark.slow
def test_a_model_of_13_billion_parameters_is_planned_in_less_than_2_gb() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAN_13B], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"planned in {found['seconds']:.1f} s with {found['peak_bytes'] / 1e9:.2f} GB")
    assert found["parameters"] == 13_015_864_320
    assert found["cuts"] > 400
    assert found["peak_bytes"] < 2e9
    assert found["seconds"] < 120

"""What `test_compiled_steps.py` runs on every rank: training steps as they are, and compiled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from sample_models import llama
from torchrun import run_checks

STEPS = 3


def check_compiled(recomputed: bool = False, regional: bool = False, **options: Any) -> None:
    """Several steps, compiled, have the losses of those that are not; each program is one graph, or
    all its layers are, if they are regions."""
    losses = []
    for compiled in (False, True):
        torch.compiler.reset()
        net, args, kwargs = llama(batch=8, layers=3 if regional else 2)
        if recomputed:
            sw.recompute(net.model.layers)
        plan = sw.plan(net, args, kwargs, devices=2, **options)
        assert bool(plan.recompute) == recomputed
        parallel: Any = sw.parallelize(net, plan, "cpu", copy=True)
        backend = CompileCounterWithBackend("aot_eager")  # type: ignore[no-untyped-call]
        if compiled:
            parallel.compile(fullgraph=True, backend=backend, regional=regional)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, foreach=False)
        for _ in range(STEPS):
            losses.append(float(parallel.train_step(*args, **kwargs)))
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if compiled:
            assert backend.frame_count == len(parallel.programs), backend.frame_count
    wanted, got = losses[:STEPS], losses[STEPS:]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert wanted[-1] < wanted[0]


def check_tensor_parallel() -> None:
    check_compiled(mem_coeff=1000.0)


def check_sharded_parameters() -> None:
    for level in ("level1", "level2", "level3"):
        for micro_batches in (1, 2) if level == "level2" else (1,):
            hsdp = {"level": level, "threshold": 0}
            check_compiled(mode="data_parallel", hsdp=hsdp, micro_batches=micro_batches)


def check_recomputed_layers() -> None:
    check_compiled(recomputed=True, mem_coeff=1000.0)


def check_stages() -> None:
    for dtype in ("float32", "bfloat16"):
        check_compiled(stages=2, micro_batches=2, compute_dtype=dtype)


def check_regions() -> None:
    check_compiled(regional=True, mem_coeff=1000.0)
    check_compiled(regional=True, recomputed=True, mem_coeff=1000.0)
    hsdp = {"level": "level3", "threshold": 0}
    check_compiled(regional=True, mode="data_parallel", hsdp=hsdp)


CHECKS = (
    check_tensor_parallel,
    check_regions,
    check_recomputed_layers,
    check_stages,
    check_sharded_parameters,
)


if __name__ == "__main__":
    run_checks(CHECKS)

"""What `bench_overlap.py` runs on both hosts: training steps under PyTorch's profiler."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from benchmarks.models import small
from shardwright.core.cost.cluster import GLOO, Cluster, Device, LinkLevel
from shardwright.core.cost.predict import predict
from shardwright.core.cost.step_time import StepTime
from shardwright.core.partition.chunk import Chunk

SIZES = {"batch": 4, "sequence": 128, "layers": 4, "heads": 8, "kv_heads": 8, "width": 512}
BANDWIDTH, LATENCY = 50_000_000, 1e-4
"""Bytes per second that a host sends, and seconds until they arrive."""


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    net, args, kwargs = small("llama", **SIZES)
    plan = sw.plan(net, args, kwargs, devices=dist.get_world_size(), mem_coeff=1000.0)
    result = {}
    for name in ("at once", "overlapped", "compiled"):
        with at_once() if name == "at once" else nullcontext():
            parallel: Any = sw.parallelize(net, plan, "cpu", copy=True)
            if name == "compiled":
                parallel.compile(fullgraph=True, backend="aot_eager")
            parallel.train_step(**kwargs)
            result[name] = measured(parallel, kwargs, steps)
    for name, beside in (("at once", False), ("overlapped", True), ("compiled", True)):
        result[f"predicted {name}"] = predicted(plan, result["at once"], beside)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def at_once() -> Iterator[None]:
    """Programs that wait for every redistribution where it is made."""

    with mock.patch.object(Chunk, "overlaps", {}):
        yield


def measured(parallel: Any, kwargs: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Milliseconds of a step, of its collectives, and of waiting for them: medians."""
    rows = []
    for _ in range(steps):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as timeline:
            started = time.perf_counter()
            parallel.train_step(**kwargs)
            seconds = time.perf_counter() - started
        parallel.zero_grad()
        events = timeline.events()
        assert events is not None
        waits = sum(e.cpu_time_total for e in events if e.name == "_c10d_functional::wait_tensor")
        sent = sum(e.time_range.elapsed_us() for e in events if e.name.startswith("gloo:"))
        rows.append((1e3 * seconds, sent / 1e3, waits / 1e3))
    step, sent, waits = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"step": step, "communication": sent, "exposed": waits}


def predicted(plan: sw.Plan, at_once: Mapping[str, float], beside: bool) -> dict[str, float]:
    """What the time model says of the same step.

    Args:
        at_once: what was measured without overlap, from which the speed of the device follows.
        beside: whether redistributions go on beside computation.
    """
    network = LinkLevel("network", BANDWIDTH, LATENCY, collectives=GLOO)

    def step(slower: float) -> StepTime:
        rates, stream = {"float32": 1e10 / slower}, 1e9 / slower
        device = Device(2**33, rates, stream, overhead=1e-5 * slower)
        return predict(
            plan.partitioned, Cluster("two hosts", device, (network,)), not beside
        ).chunks[0]

    once = step(1.0)
    slower = (at_once["step"] - at_once["exposed"]) / 1e3 / (once.forward + once.backward)
    time = step(slower)
    sent = time.forward_redistributions + time.backward_redistributions
    sent += time.gathers + time.gradients
    seconds = {"step": time.seconds, "communication": sent, "exposed": time.communication}
    return {name: 1e3 * each for name, each in seconds.items()}


if __name__ == "__main__":
    main(int(sys.argv[1]))

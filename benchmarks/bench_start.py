"""A rank starts, and is called with other shapes

The rise of the peak of memory of one process, as the operating system counts it, until a rank of 8
devices has its share of a model of 1.07 B parameters in bfloat16, which are sharded over all 8. The
model is *built before*, with all its values, and kept or released by `parallelize`; or made *inside
`no_init_parameters`*. Goals: at most 1.25 times the parameters if the model is released, a quarter
of them inside of `no_init_parameters`.

A LLaMA of two layers on one device, planned for 64 tokens a sequence and called with other lengths:
each is captured once, in seconds of CPU, with the decisions of the plan; the median and the range
of five. Padded to multiples of 64 all five are the planned shape. Goal: under 1 s.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import nn

import shardwright as sw
from benchmarks.models import small
from benchmarks.table import Table
from benchmarks.timing import Sample, cpu_seconds, in_fresh_process
from shardwright.train import PadToMultiple
from shardwright.train.lone_rank import fake_process_group

DEVICES, WIDTH, LAYERS = 8, 4096, 64
WAYS = {"built before, kept": None, "built before, released": 1.25, "no_init_parameters": 0.25}
"""For each the multiple of the parameters that it may take."""

LENGTHS = (16, 24, 32, 40, 48)
SECONDS_GOAL = 1.0


def run() -> list[Table]:
    table = Table("Memory at start", ("the model is", "of the parameters", "GiB"))
    for way, goal in WAYS.items():
        rise, size = in_fresh_process(partial(memory, way))
        table.add(way, f"{rise / size:.2f}", f"{rise / 2**30:.2f}")
        if goal is not None and rise > goal * size:
            table.missed.append(f"{way}: {rise / size:.2f} is more than {goal}")
    return [table, shapes()]


def memory(way: str) -> tuple[int, int]:
    """Bytes by which the peak rises, and those of all parameters."""
    example = (torch.ones(DEVICES, WIDTH, dtype=torch.bfloat16),)
    with sw.no_init_parameters():
        plan = sw.plan(stack(), example, devices=DEVICES, mode="data_parallel", hsdp=SHARDED)
    before = peak()
    with fake_process_group(0, DEVICES):
        with sw.no_init_parameters() if way == "no_init_parameters" else nullcontext():
            net = stack()
        size = sum(parameter.nbytes for parameter in net.parameters())
        kept = sw.parallelize(net, plan, "cpu", sync=False, release="released" in way)
        rise = peak() - before
        assert kept is not net
    return rise, size


SHARDED: Any = {"shard_size": DEVICES, "threshold": 0}


def stack() -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def peak() -> int:
    """Bytes that this process had at most."""
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024


def shapes() -> Table:
    """Seconds of the first call with each length."""
    net, *_ = small("llama", layers=2)
    planned = batch(64, 64)
    parallel = sw.parallelize(net, sw.plan(net, kwargs=planned, devices=1))
    parallel(**planned)
    table = Table("CPU seconds of the first call with a length", ("lengths are", "s", "captures"))

    def first(length: int, multiple: int) -> float:
        call = batch(length, multiple)
        return cpu_seconds(lambda: parallel(**call))

    for name, multiple in (("padded to 64", 64), ("as they are", 1)):
        before = len(parallel.execution._forwards)
        found = Sample(tuple(first(length, multiple) for length in LENGTHS))
        seconds = f"{found.median:.2f} ({min(found.values):.2f}–{max(found.values):.2f})"
        table.add(name, seconds, len(parallel.execution._forwards) - before)
        if found.median >= SECONDS_GOAL:
            table.missed.append(f"{name}: {found.median:.2f} s")
    return table


def batch(length: int, multiple: int) -> dict[str, Any]:
    """Four samples of a length, padded to a multiple."""
    ids = torch.arange(length)
    pad = PadToMultiple({"input_ids": 0, "labels": -100}, multiple)
    return pad([{"input_ids": ids, "labels": ids}] * 4)

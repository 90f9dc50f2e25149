"""A rank starts, and is called with other shapes

The rise of the peak of memory of one process, as the operating system counts it, until a rank of 8
devices has its share of a model of 1.07 B parameters in bfloat16, which are sharded over all 8. The
model is *built before*, with all its values, and kept or released by `parallelize`; or made *inside
`no_init_parameters`*. Goals: at most 1.25 times the parameters if the model is released, a quarter
of them inside of `no_init_parameters`.

LLaMAs of small width on one device, planned for 64 tokens a sequence and called with five other
lengths, in seconds of CPU. The first is captured by itself. The second is traced with a symbol for
the length, and the trace must give the graphs that are known. Later ones follow from that trace;
this is their median. Padded to multiples of 64 all five are the planned shape. Goals: the first
under 1 s for two layers, later ones in half the time of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import torch
from torch import nn

import shardwright as sw
from benchmarks.models import small
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds, in_fresh_process
from shardwright.core.api.lone_rank import fake_process_group
from shardwright.run import PadToMultiple

DEVICES, WIDTH, LAYERS = 8, 4096, 64
WAYS = {"built before, kept": None, "built before, in place": 1.25, "no_init_parameters": 0.25}
"""For each the multiple of the parameters that it may take."""

LENGTHS = (16, 24, 32, 40, 48)
SECONDS_GOAL = 1.0


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table("Memory at start", ("the model is", "of the parameters", "GiB"))
    for way, goal in WAYS.items():
        rise, size = in_fresh_process(partial(memory, way))
        table.add(way, f"{rise / size:.2f}", f"{rise / 2**30:.2f}")
        if goal is not None and rise > goal * size:
            table.missed.append(f"{way}: {rise / size:.2f} is more than {goal}")
    return [table, shapes(size.of((2, 8), full=(2, 8, 32)))]


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
        kept = "kept" in way
        planned = sw.parallelize(net, plan, "cpu", copy=kept, sync=False)
        rise = peak() - before
        assert (planned is net) is not kept
    return rise, size


SHARDED: Any = {"shard_size": DEVICES, "threshold": 0}


def stack() -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def peak() -> int:
    """Bytes that this process had at most."""
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024


def shapes(counts: Sequence[int]) -> Table:
    """Seconds of the first call with each length."""
    head = ("layers", "lengths are", "first", "second", "later")
    table = Table("CPU seconds of the first call with a length", head)
    for layers, name, multiple in (
        (2, "padded to 64", 64),
        *((layers, "as they are", 1) for layers in counts),
    ):
        first, second, later = seconds_of_calls(layers, multiple)
        table.add(layers, name, *(f"{s:.2f}" for s in (first, second, later)))
        if layers == 2 and first >= SECONDS_GOAL:
            table.missed.append(f"{layers} layers, {name}: {first:.2f} s")
        if multiple == 1 and later > first / 2:
            table.missed.append(f"{layers} layers, later: {later:.2f} s of {first:.2f} s")
    return table


def seconds_of_calls(layers: int, multiple: int) -> tuple[float, float, float]:
    """Of the first call with the first of `LENGTHS`, the second, and the median of the others."""
    net, *_ = small("llama", layers=layers)
    planned = batch(64, 64)
    parallel = sw.parallelize(net, sw.plan(net, kwargs=planned, devices=1), copy=True)
    parallel(**planned)
    calls = [batch(length, multiple) for length in LENGTHS]
    first, second, *later = (cpu_seconds(partial(parallel, **call)) for call in calls)
    return first, second, median(later)


def batch(length: int, multiple: int) -> dict[str, Any]:
    """Four samples of a length, padded to a multiple."""
    ids = torch.arange(length)
    pad = PadToMultiple({"input_ids": 0, "labels": -100}, multiple)
    return pad([{"input_ids": ids, "labels": ids}] * 4)

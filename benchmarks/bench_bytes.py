"""Planned and counted bytes

The bytes that one device sends per step according to the plan, and the bytes counted while its
program runs forward and backward on 8 simulated ranks (`sw.check`, in float64). Plans of the
recursive search with three values of `mem_coeff`, and data parallel. Goal: equal to the byte. Where
both are 0 + 0, the search sharded nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import shardwright as sw
from benchmarks.models import Model, example, examples, small
from benchmarks.size import Size
from benchmarks.table import Table

DEVICES = 8
PLANS: dict[str, dict[str, Any]] = {
    "mem_coeff=0.001": {"mem_coeff": 0.001},
    "mem_coeff=0.1": {"mem_coeff": 0.1},
    "mem_coeff=10": {"mem_coeff": 10.0},
    "data_parallel": {"mode": "data_parallel"},
}
MODELS = ("mlp", "network", "resnet", "encoder", "llama", "gpt2", "bert")
"""Builders in `tests/sample_models.py`."""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table(
        f"Bytes that one of {DEVICES} devices sends per step, forward + backward",
        ("model", "plan", "planned", "counted", "equal"),
    )
    models: dict[str, Callable[[], Model]] = {name: partial(example, name) for name in examples()}
    models |= {name: partial(small, name, batch=DEVICES) for name in MODELS}
    titles = size.of(("mem_coeff=0.1", "data_parallel"), full=tuple(PLANS))
    for name, build in models.items():
        for title in titles:
            net, args, kwargs = build()
            plan = sw.plan(net, args, kwargs, devices=DEVICES, **PLANS[title])
            add(table, name, title, sw.check(net, args, kwargs, plan))
    return [table]


def add(table: Table, name: str, title: str, check: sw.Check) -> None:
    """Adds the bytes of one plan."""
    equal = check.planned_bytes == check.counted_bytes
    planned, counted = (f"{f:,} + {b:,}" for f, b in (check.planned_bytes, check.counted_bytes))
    table.add(name, title, planned, counted, "yes" if equal else "NO")
    if not equal:
        table.missed.append(f"{name}, {title}: planned {planned} bytes, counted {counted}")

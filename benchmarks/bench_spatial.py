"""Images, volumes and graphs on 4 to 64 devices

**Predicted**: one image of 2,048 × 2,048 pixels, one volume of 256³ voxels and one weather map of
720 × 1,440 points, too few samples for data parallel. A residual network, U-Nets with group norms,
ConvNeXt-T and a FourCastNet are planned on H100, in float32: with rows and columns of convolutions
and pools sharded, which exchange halos with the neighboring shards, and with batch and channels
alone. A graph network of three layers, 200,000 nodes and 10 million edges is planned on 8 devices,
by the search, data parallel (nodes sharded) and on one. Seconds of a training step are predicted,
bytes are those that one device sends in it. Goals: never slower with halos, and twice as fast for
one network; the search shards the edges, and is three times as fast as the others.

**Measured**: small ones in a batch of 4, forward, backward and SGD update, on 4 local processes,
one thread each, that take turns: the module itself in one process, data parallel, the plan of the
search for this machine, and the rows of images sharded. *Halos*: the share of the last that is
waited for halos, measured by steps that read rows of their own in place of their neighbors'. Goal:
the search is no slower than data parallel, and for graphs faster than one device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import shardwright as sw
from benchmarks.size import Size
from benchmarks.spatial_models import Classifier, ConvNext, Forecast, GraphNetwork, UNet, graph
from benchmarks.spatial_ranks import LOCAL_HALOS, MODELS, ROWS
from benchmarks.structures_ranks import ALONE
from benchmarks.table import Table
from benchmarks.timing import Sample, in_fork
from benchmarks.torchrun import torchrun
from shardwright.core.cost.memory import bytes_text
from shardwright.core.rules.windowed import Window

DEVICES, RANKS = (8, 64), 4
DATA_PARALLEL, AUTOMATIC = "data parallel", "automatic"

LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual network, 2,048²": (Classifier, (1, 3, 2048, 2048)),
    "U-Net, 2,048²": (partial(UNet, 2), (1, 3, 2048, 2048)),
    "FourCastNet, 720 × 1,440": (Forecast, (1, 20, 720, 1440)),
    "ConvNeXt-T, 2,048²": (ConvNext, (1, 3, 2048, 2048)),
    "U-Net, 256³": (partial(UNet, 3, 16), (1, 3, 256, 256, 256)),
}


def run(size: Size = Size.DEFAULT) -> list[Table]:
    large, small = (list(LARGE), list(MODELS))
    names = size.of((large[:3], small[:2]), full=(large, small))
    return [
        _predicted(names[0], DEVICES[: size.of(1, full=2)]),
        _graph(),
        _measured(names[1], size.of(3, full=8)),
    ]


def _predicted(names: list[str], counts: tuple[int, ...]) -> Table:
    columns = ("model", "devices", "step, ms", "sent", "without, ms", "sent without", "ratio")
    table, gains = Table("Predicted steps", columns), []
    for name in names:
        for devices in counts:
            seconds, sent = in_fork(partial(_step, name, devices, True))
            before, sent_before = in_fork(partial(_step, name, devices, False))
            gains.append(before / seconds)
            times = (
                f"{1e3 * seconds:.2f}",
                bytes_text(sent),
                f"{1e3 * before:.2f}",
                bytes_text(sent_before),
            )
            table.add(name, devices, *times, f"{gains[-1]:.2f}")
    if min(gains) < 1:
        table.missed.append("a plan is slower with sharded rows and columns")
    if max(gains) < 2:
        table.missed.append("no plan is twice as fast")
    return table


def _step(name: str, devices: int, shards_space: bool) -> tuple[float, int]:
    """Predicted seconds of a training step, and bytes that one device sends in it."""
    make, shape = LARGE[name]
    if not shards_space:
        patch.object(Window, "capacity", 1).start()
    with torch.device("meta"):
        net, x = make(), torch.empty(shape)
    plan = sw.plan(net, (x,), devices=devices, cluster="h100", memory_limit="none")
    assert plan.step_time is not None
    return plan.step_time, plan.bytes


def _graph() -> Table:
    table = Table("A graph of 10 million edges", ("way", "devices", "step, ms", "sent", "edges"))
    with torch.device("meta"):
        net, call = GraphNetwork(), graph(200_000, 10_000_000)
    seconds, options = {}, {"cluster": "h100", "memory_limit": "none"}
    for way, mode in (
        (AUTOMATIC, "recursive_programming"),
        (DATA_PARALLEL, "data_parallel"),
        (ALONE, "stand_alone"),
    ):
        plan = sw.plan(net, call, devices=DEVICES[0], mode=mode, **options)
        assert plan.step_time is not None
        seconds[way] = plan.step_time
        shards = max((plan.mesh.size(cuts.get("e", ())) for cuts in plan.cuts.values()), default=1)
        table.add(way, DEVICES[0], f"{1e3 * plan.step_time:.2f}", bytes_text(plan.bytes), shards)
    if 3 * seconds.pop(AUTOMATIC) > min(seconds.values()):
        table.missed.append("the search is not three times as fast as the others")
    return table


def _measured(names: list[str], rounds: int) -> Table:
    table = Table(
        f"A training step on {RANKS} processes, {rounds} rounds, median (smallest–largest)",
        ("model", "way", "device mesh", "ms", "sent", "halos"),
    )
    for name in names:
        arguments = ("--only", name, "--rounds", str(rounds))
        lines = torchrun("spatial_ranks", RANKS, *arguments).strip().splitlines()
        ways: dict[str, dict[str, Any]] = json.loads(lines[-1])
        samples = {way: Sample(tuple(facts["seconds"])) for way, facts in ways.items()}
        for way, facts in ways.items():
            if way != LOCAL_HALOS:
                share = "–"
                if way == ROWS:
                    share = f"{max(0, 1 - samples[LOCAL_HALOS].median / samples[ROWS].median):.0%}"
                sent = bytes_text(facts["planned"]) if "planned" in facts else "–"
                cells = facts.get("mesh", "–"), samples[way].milliseconds(), sent, share
                table.add(name, way, *cells)
        _add_misses(table, name, samples)
    return table


def _add_misses(table: Table, name: str, samples: dict[str, Sample]) -> None:
    fastest = min(samples[AUTOMATIC].values)
    for way in (DATA_PARALLEL, *([ALONE] if ROWS not in samples else [])):
        if fastest > samples[way].median:
            table.missed.append(f"{name}: the search is slower than {way}")

"""Pinned operators

The effect of 2, 4 and 8 pins on the plans of three models for 8 devices: redistributions, bytes and
planning time of `semi_auto` (other operators follow the batch), `sharding_propagation` (other
operators follow the pinned ones, with the least redistribution between operators) and
`recursive_programming` (the search with pins). For comparison, without pins: everything along the
batch, and the search alone.

*Which are pinned*: of the linear layers and convolutions, in order, the middle ones of 2, 4 or 8
equal parts of the list. The feed-forward network of `examples/ffn.py` has five; its other three
pins are of flatten, ReLU and loss. *How*: as an expert would by hand. Feed-forward network and
LLaMA (4 layers, width 1024, batch 16, sequence 512): 2-way data parallel, and each pair of layers
4-way tensor parallel, the first by columns (output features), the second by rows (input features:
q, k, v, gate, up and the output layer by columns, o and down by rows); the last layer of the
feed-forward network 8-way data parallel. ResNet-18 (width 64, batch 32, images of 64 x 64): the
first half 8-way data parallel, the second half 2-way data parallel and 4-way along the channels, by
columns and rows in turn.

*Redistributions*: those that send anything, forward or backward, and how many of these are of
parameters: all-reduces of gradients if the batch is sharded. *Bytes*: sent by one device per step,
forward and backward, and how many of these are for parameters. *Planning*: CPU time of `sw.plan` of
the captured graph, each time in a fork that planned nothing before; median of 3, with minimum and
maximum.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

import shardwright as sw
from benchmarks.models import Model, feed_forward, small
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample, cpu_seconds, in_fork
from shardwright.core.graph.graph import Graph

DEVICES, BATCH_PARTS, MODEL_PARTS = 8, 2, 4
COUNTS = (2, 4, 8)
PROCESSES = 3
MODES = ("semi_auto", "sharding_propagation", "recursive_programming")
NOT_PINNED = ("semi_auto", "recursive_programming")

Strategy = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """A model and what an expert says of its layers.

    Args:
        build: makes it.
        dims: of what its linear layers read.
        ways: for layers whose path matches the pattern, the first that does: `batch`, `columns` or
            `rows`.
        others: strategies of modules that are no layers, pinned after all of these.
    """

    build: Callable[[], Model]
    dims: int
    ways: Mapping[str, str]
    others: Mapping[str, Strategy]


CASES = {
    "FFN": Case(
        feed_forward,
        dims=2,
        ways={r"dense[13]": "columns", r"dense[24]": "rows", "": "batch"},
        others={
            "net.flatten": ((2, 1, 1, 1),),
            "net.relu": ((2, 4),),
            "loss_fn": ((2, 1), (2,)),
        },
    ),
    "ResNet-18": Case(
        partial(small, "resnet", batch=32, width=64),
        dims=2,
        ways={
            r"^conv1|stages\.[01]": "batch",
            r"conv1|downsample": "columns",
            r"conv2|fc": "rows",
        },
        others={},
    ),
    "LLaMA": Case(
        partial(
            small,
            "llama",
            batch=16,
            sequence=512,
            layers=4,
            heads=16,
            kv_heads=4,
            width=1024,
            vocabulary=8192,
        ),
        dims=3,
        ways={r"o_proj|down_proj": "rows", "": "columns"},
        others={},
    ),
}


@dataclass(frozen=True)
class Planned:
    """What a plan sends, in all and for parameters, and the CPU seconds that planning took."""

    redistributions: int
    of_parameters: int
    bytes: int
    bytes_of_parameters: int
    seconds: float


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table(
        f"Plans for {DEVICES} devices",
        (
            *("model", "pins", "mode", "redistributions", "of parameters"),
            *("bytes per step", "for parameters", "planning, ms"),
        ),
    )
    for name, case in CASES.items():
        for count in (0, *size.of(COUNTS[1:2], full=COUNTS)):
            graph = pinned_graph(case, count)
            # A fork that collects garbage would walk over, and so copy, all that capture left.
            gc.collect()
            gc.freeze()
            for mode in MODES if count else NOT_PINNED:
                found = [in_fork(partial(planned, graph, mode)) for _ in range(PROCESSES)]
                one = found[0]
                table.add(
                    *(name, count, mode, one.redistributions, one.of_parameters),
                    *(f"{one.bytes:,}", f"{one.bytes_of_parameters:,}"),
                    Sample(tuple(each.seconds for each in found)).milliseconds(),
                )
            gc.unfreeze()
    return [table]


def pinned_graph(case: Case, count: int) -> Graph:
    """The model, captured with `count` pins."""
    net, args, kwargs = case.build()
    for path, strategy in pins(case, net, count).items():
        sw.shard(net.get_submodule(path), strategy)
    return sw.capture(net, args, kwargs)


def pins(case: Case, net: nn.Module, count: int) -> dict[str, Strategy]:
    """The strategies of the modules that are pinned.

    Raises:
        ValueError: if there are not so many to choose from.
    """
    layers = [
        path for path, module in net.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    if count > len(layers) + len(case.others):
        raise ValueError(f"{count} pins for {len(layers)} layers and {len(case.others)} others")
    chosen = evenly_spread(layers, min(count, len(layers)))
    strategies = {path: _strategy(case, path, net.get_submodule(path)) for path in chosen}
    others = list(case.others)[: count - len(chosen)]
    return strategies | {path: case.others[path] for path in others}


def evenly_spread(items: list[str], count: int) -> list[str]:
    """Those in the middle of `count` equal parts of `items`."""
    return [items[(2 * part + 1) * len(items) // (2 * count)] for part in range(count)]


def _strategy(case: Case, path: str, layer: nn.Module) -> Strategy:
    """Parts of what the layer reads and of its weight (out, in, ...)."""
    way = next(way for pattern, way in case.ways.items() if re.search(pattern, path))
    convolution = isinstance(layer, nn.Conv2d)
    read, weight = [1] * (4 if convolution else case.dims), [1] * (4 if convolution else 2)
    read[0] = DEVICES if way == "batch" else BATCH_PARTS
    if way == "columns":
        weight[0] = MODEL_PARTS
    elif way == "rows":
        read[1 if convolution else -1] = weight[1] = MODEL_PARTS
    return tuple(read), tuple(weight)


def planned(graph: Graph, mode: str) -> Planned:
    """Plans `graph` and counts."""
    plans: list[sw.Plan] = []
    seconds = cpu_seconds(lambda: plans.append(sw.plan(graph, devices=DEVICES, mode=mode)))
    (plan,) = plans
    parts = [row.redistributions for row in plan.operators] + [plan.returned]
    sending = [
        (
            redistribution.value in plan.parameters,
            redistribution.forward_bytes + redistribution.backward_bytes,
        )
        for redistributions in parts
        for redistribution in redistributions
        if redistribution.forward_bytes or redistribution.backward_bytes
    ]
    of_parameters = [size for parameter, size in sending if parameter]
    return Planned(len(sending), len(of_parameters), plan.bytes, sum(of_parameters), seconds)

"""What `bench_spatial.py` runs on every rank: training steps of one small model, in turn."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw
from benchmarks.data_parallel_ranks import Step
from benchmarks.spatial_models import ConvNext, Forecast, GraphNetwork, UNet, graph
from benchmarks.structures_ranks import ALONE, Model, alone, planned, print_seconds
from shardwright.core.rules.windowed import HaloExchange

ROWS, LOCAL_HALOS = "rows sharded", "without halos"
BATCH = 4


def image(net: nn.Module, *shape: int) -> Model:
    return net, {"x": torch.randn(BATCH, *shape)}


def network_of_graph() -> Model:
    tensors = graph(nodes=5_000, edges=100_000)
    return GraphNetwork(), dict(zip(("x", "edges", "labels"), tensors, strict=True))


MODELS: dict[str, Callable[[], Model]] = {
    "U-Net, 64²": lambda: image(UNet(2, 16), 3, 64, 64),
    "graph network, 100,000 edges": network_of_graph,
    "U-Net, 16³": lambda: image(UNet(3, 8), 3, 16, 16, 16),
    "ConvNeXt, 128²": lambda: image(
        ConvNext(hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1]), 3, 128, 128
    ),
    "FourCastNet, 32 × 64": lambda: image(Forecast(8, 64, 4, 4, 4), 8, 32, 64),
}


def rows_sharded(make: Callable[[], Model]) -> tuple[Step, dict[str, Any]]:
    """The step of the plan that follows from the rows of the first convolution."""

    def pinned() -> Model:
        net, kwargs = make()
        first = next(m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Conv3d))
        whole = (1,) * (first.weight.ndim - 3)
        rows = (1, 1, dist.get_world_size(), *whole)
        sw.shard(first, (rows, (1,) * first.weight.ndim))
        return net, kwargs

    return planned(pinned, mode="sharding_propagation")


def without_halos(step: Step) -> Step:
    """The step with rows of its own in place of those of its neighbors, to see what these cost."""
    extend = HaloExchange.extend

    def extend_locally(border: HaloExchange, x: Tensor) -> Tensor:
        return extend(
            replace(
                border, from_previous=_own(border.from_previous), from_next=_own(border.from_next)
            ),
            x,
        )

    def run() -> Tensor:
        with patch.object(HaloExchange, "extend", extend_locally):
            return step()

    return run


def _own(exchange: Any) -> Any:
    return exchange and (lambda rows: rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=MODELS, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    make = MODELS[asked.only]
    ways: dict[str, Callable[[Callable[[], Model]], tuple[Step, dict[str, Any]]]] = {
        "data parallel": partial(planned, mode="data_parallel"),
        "automatic": partial(planned, cluster="local"),
    }
    if make is not network_of_graph:
        ways[ROWS] = rows_sharded
    steps: dict[str, Step] = {ALONE: alone(make)}
    facts: dict[str, dict[str, Any]] = {ALONE: {}}
    for name, way in ways.items():
        torch.manual_seed(0)
        steps[name], facts[name] = way(make)
    if ROWS in steps:
        steps[LOCAL_HALOS], facts[LOCAL_HALOS] = without_halos(steps[ROWS]), {}
    for step in steps.values():
        step()
    print_seconds(steps, facts, asked.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

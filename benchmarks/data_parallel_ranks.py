"""What `bench_data_parallel.py` runs on every rank: our steps and PyTorch's own, in turn."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from benchmarks.models import Model, small

SIZES: dict[str, Any] = {
    "batch": 8,
    "sequence": 128,
    "layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "width": 256,
    "vocabulary": 1024,
}
LEARNING_RATE = 0.01
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")

Step = Callable[[], Tensor]


def model() -> Model:
    return small("llama", **SIZES)


def layer_mb() -> float:
    """The size of one decoder layer in MiB: what `fully_shard` gathers at once."""
    net, _, _ = model()
    return sum(p.numel() * p.element_size() for p in layers_of(net)[0].parameters()) / 2**20


def layers_of(net: nn.Module) -> list[nn.Module]:
    return list(net.get_submodule("model.layers").children())


def part_of_batch(kwargs: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {k: v.chunk(world)[rank] if isinstance(v, Tensor) else v for k, v in kwargs.items()}


def step_of(net: nn.Module, kwargs: dict[str, Any]) -> Step:
    """Forward, backward and update."""

    def forward_and_backward() -> Tensor:
        loss: Tensor = net(**kwargs).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return with_update(net, forward_and_backward)


def with_update(net: nn.Module, forward_and_backward: Step) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor:
        loss = forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ours(pinned: bool = False, **options: Any) -> Step:
    net, args, kwargs = model()
    if pinned:
        parts = dist.get_world_size()
        for path, module in net.named_modules():
            name = path.rpartition(".")[2]
            if name in COLUMNS:
                sw.shard(module, ((1, 1, 1), (parts, 1)))
            elif name in ROWS:
                sw.shard(module, ((1, 1, parts), (1, parts)))
    return planned(net, args, kwargs, **options)


def planned(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Step:
    plan = sw.plan(net, args, kwargs, devices=dist.get_world_size(), **options)
    parallel: Any = sw.parallelize(net, plan, "cpu", copy=True)
    return with_update(parallel, lambda: parallel.train_step(**kwargs))


def ddp() -> Step:
    net, _, kwargs = model()
    return step_of(DistributedDataParallel(net), part_of_batch(kwargs))


def fsdp(reshard: bool) -> Step:
    net, _, kwargs = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers_of(net):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
    return step_of(net, part_of_batch(kwargs))


def tensor_parallel() -> Step:
    net, _, kwargs = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways: dict[str, ParallelStyle] = {f"*.{name}": ColwiseParallel() for name in COLUMNS}
    ways |= {f"*.{name}": RowwiseParallel() for name in ROWS}
    for layer in layers_of(net):
        parallelize_module(layer, mesh, ways)
    return step_of(net, kwargs)


Cases = dict[str, tuple[Callable[[], Step], Callable[[], Step]]]


def cases() -> Cases:
    """Name → ours and PyTorch's."""
    sharded: dict[str, Any] = {"mode": "data_parallel", "bucket_mb": layer_mb()}
    return {
        "data parallel / DDP": (lambda: ours(mode="data_parallel"), ddp),
        "level1 / fully_shard, kept": (
            lambda: ours(hsdp=sw.OptimizerParallel("level1"), **sharded),
            lambda: fsdp(reshard=False),
        ),
        "level3 / fully_shard, resharded": (
            lambda: ours(hsdp=sw.OptimizerParallel("level3"), **sharded),
            lambda: fsdp(reshard=True),
        ),
        "tensor parallel / parallelize_module": (
            lambda: ours(pinned=True, mode="sharding_propagation"),
            tensor_parallel,
        ),
    }


def seconds_of(step: Step) -> float:
    """Of the slowest rank; all start together."""
    dist.barrier()
    started = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def main(cases: Callable[[], Cases] = cases) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    found: dict[str, list[tuple[float, float]]] = {}
    for name, makers in cases().items():
        if asked.only not in name:
            continue
        steps = [make() for make in makers]
        for _ in range(asked.warm_up):
            for step in steps:
                step()
        found[name] = []
        for number in range(asked.rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            taken = {place: seconds_of(steps[place]) for place in order}
            found[name].append((taken[0], taken[1]))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

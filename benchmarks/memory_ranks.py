"""What `bench_memory` runs on every rank: the peak of the second step of each case, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

import shardwright as sw
from benchmarks.allocations import peak_of_second_step
from benchmarks.memory_cases import CASES, Case


def main(file: str, *names: str) -> None:
    dist.init_process_group("gloo")
    measured: dict[str, list[int]] = {}
    for name in names or CASES:
        mine = peak(CASES[name])
        every: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        measured[name] = every
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(measured))
    dist.destroy_process_group()


def peak(case: Case) -> int:
    """Bytes of this process' tensors when the second step needs most."""
    model = [case.model()]
    net, args, kwargs = model[0]
    plan = sw.plan(net, args, kwargs, devices=dist.get_world_size(), **case.options)
    del net

    def prepare() -> Callable[[], None]:
        mine, args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, model.pop())
        parallel = sw.parallelize(mine, plan, "cpu")
        optimizer = case.optimizer([p for p in parallel.parameters() if p is not None])

        def step() -> None:
            parallel.train_step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return peak_of_second_step(prepare)


if __name__ == "__main__":
    main(*sys.argv[1:])

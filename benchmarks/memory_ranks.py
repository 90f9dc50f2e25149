"""What `bench_memory` runs on every rank: the peak of a later step of each case, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import shardwright as sw
from benchmarks.allocations import peak_of_later_steps
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
    """Bytes of this process' tensors when a later step needs most."""
    plan = case.plan(dist.get_world_size())

    def prepare() -> Callable[[], None]:
        net, args, kwargs = case.model()
        parallel = sw.parallelize(net, plan, "cpu", copy=True)
        optimizer = case.optimizer([p for p in parallel.parameters() if p is not None])

        def step() -> None:
            parallel.train_step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return peak_of_later_steps(prepare)


if __name__ == "__main__":
    main(*sys.argv[1:])

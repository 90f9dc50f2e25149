"""What each process runs that measures plans: training steps of all of them in turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright.api import parallelize
from shardwright.compare.tiny import tiny_run
from shardwright.config.build import Run
from shardwright.errors import PlanError, ShardwrightError
from shardwright.graph.pickled import loads
from shardwright.lower.parallel import ParallelModule
from shardwright.plan import Plan
from shardwright.train.process_group import World, process_group

WARM_UP = 2
"""Steps of each plan before any is timed: buffers are allocated, connections are made."""


@dataclass(frozen=True)
class Order:
    """What is measured of one model.

    Args:
        config: the expert's configuration, of which the tiny variant is trained.
        graph: the file of its captured graph.
        plans: for each way the file of its plan.
        rounds: how many steps of each are timed.
    """

    config: str
    graph: str
    plans: dict[str, str]
    rounds: int


def measured(order: Order, world: World, device: torch.device) -> list[list[float]]:
    """For each plan the seconds of its steps, as long as the slowest process took.

    The plans take turns, each round in another order, so that what else the machine does hits all
    alike.
    """
    run = tiny_run(Run.from_file(order.config), world.size)
    graph = loads(Path(order.graph).read_bytes())
    batches = cycle(run.batches.epoch(0))
    steps = []
    for way, file in order.plans.items():
        plan = replace(Plan.load(file), graph=graph)
        try:
            step = _step(run, plan, next(batches), device)
            for _ in range(WARM_UP):
                step()
        except ShardwrightError as error:
            raise PlanError(f"{order.config}: {way} cannot run: {error}") from error
        steps.append(step)
    found: list[list[float]] = [[] for _ in steps]
    for number in range(order.rounds):
        for place in in_turn(len(steps), number):
            found[place].append(_seconds(steps[place]))
    return found


def _step(
    run: Run, plan: Plan, batch: Sequence[Tensor], device: torch.device
) -> Callable[[], object]:
    """Forward, backward and update as `train` makes them."""
    net = parallelize(run.model().to(device), plan, device)
    assert isinstance(net, ParallelModule)
    optimizer = run.optimizer(net.parameters())
    here = [tensor.to(device) for tensor in batch]

    def step() -> None:
        net.train_step(*here)
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_turn(count: int, number: int) -> list[int]:
    """All places; each round begins with the next, and every other one goes backwards."""
    step = -1 if number % 2 else 1
    return [(number + step * place) % count for place in range(count)]


def _seconds(step: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


@record
def main(asked: str, answer: str) -> None:
    """Measures the orders in the file `asked`; rank 0 writes the seconds into `answer`."""
    orders = [Order(**each) for each in json.loads(Path(asked).read_text(encoding="utf-8"))]
    world = World.from_environment()
    with process_group(world) as device:
        found = [measured(order, world, device) for order in orders]
        if world.rank == 0:
            Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The process that measures plans: training steps of all of them in turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright.core.api import parallelize
from shardwright.core.graph.serialize import loads
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.errors import ConfigError, PlanError, ShardwrightError
from shardwright.models.sizes import Dimensions
from shardwright.run.config.run import Run
from shardwright.run.config.schema import RecomputeSection
from shardwright.run.launch.process_group import World, process_group

WARM_UP = 2
"""Steps of each plan before any is timed: buffers are allocated, connections are made."""

BATCH, MICRO_BATCHES = 16, 2
"""Samples of a step, and into how many pieces they are cut, so that there can be two stages."""


@dataclass(frozen=True)
class MeasureOrder:
    """What is measured of one model.

    Args:
        config: the expert's configuration, of which the tiny variant is trained.
        graph: the file of its captured graph.
        plans: for each alternative the file of its plan.
        rounds: how many steps of each are timed.
    """

    config: str
    graph: str
    plans: dict[str, str]
    rounds: int


def measure(order: MeasureOrder, world: World, device: torch.device) -> list[list[float]]:
    """For each plan the seconds of its steps, as long as the slowest process took.

    The plans take turns, each round in another order, so that what else the machine does hits all
    alike.
    """
    run = tiny_run(Run.from_file(order.config), world.size)
    graph = loads(Path(order.graph).read_bytes())
    batches = cycle(run.batches.epoch(0))
    steps = []
    for name, file in order.plans.items():
        plan = replace(Plan.load(file), graph=graph)
        try:
            step = _step(run, plan, next(batches), device)
            for _ in range(WARM_UP):
                step()
        except ShardwrightError as error:
            raise PlanError(f"{order.config}: {name} cannot run: {error}") from error
        steps.append(step)
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(order.rounds):
        for place in in_turn(len(steps), number):
            seconds[place].append(_seconds(steps[place]))
    return seconds


def _step(
    run: Run, plan: Plan, batch: Sequence[Tensor], device: torch.device
) -> Callable[[], object]:
    """Forward, backward and update as `train` makes them."""
    net = parallelize(run.model(), plan, device)
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
    """Of a step that follows another one of its kind, as in training."""
    step()
    dist.barrier()
    started = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


@record
def run_worker(request: str, result: str) -> None:
    """Measures the order in the file `request`; rank 0 writes the seconds into `result`."""
    order = MeasureOrder(**json.loads(Path(request).read_text(encoding="utf-8")))
    world = World.from_environment()
    with process_group(world) as device:
        seconds = measure(order, world, device)
        if world.rank == 0:
            Path(result).write_text(json.dumps(seconds), encoding="utf-8")


def tiny_run(run: Run, devices: int) -> Run:
    """An expert's run of the tiny variant on so many devices, in single precision on texts that are
    built in: as many stages as there are blocks at most, model parallel as in the file where it
    divides the devices that are left, and data parallel over the others. All parameters are stored
    sharded where the file shards any.

    Args:
        run: an expert's.

    Raises:
        ConfigError: so many devices do not divide it.
    """
    parallel, sizes = run.config.parallel, run.config.model.sizes
    assert parallel.expert is not None and sizes is not None
    large = Dimensions(**sizes)
    tiny = large.tiny()
    stages = _shared(int(parallel.stages), tiny.num_layers, devices)
    model = _shared(parallel.expert.model_parallel, tiny.num_kv_heads, devices // stages)
    data, rows = devices // stages // model, BATCH // MICRO_BATCHES
    if rows % data:
        raise ConfigError(
            f"devices={devices}: the tiny variant has {rows} samples in a micro-batch, which {data}"
            " data parallel parts do not divide; valid are 2, 4, 8"
        )
    expert = parallel.expert.model_copy(update={"data_parallel": data, "model_parallel": model})
    whole = {"threshold": 0}
    config = run.config.model_copy(
        update={
            "model": run.config.model.model_copy(update={"sizes": vars(tiny)}),
            "data": run.config.data.model_copy(
                update={"seq_length": tiny.seq_length, "batch_size": BATCH, "path": None}
            ),
            "parallel": parallel.model_copy(
                update={
                    "expert": expert,
                    "stages": stages,
                    "micro_batches": MICRO_BATCHES,
                    "hsdp": parallel.hsdp and parallel.hsdp.model_copy(update=whole),
                    "recompute": _for_fewer(parallel.recompute, large.num_layers, tiny.num_layers),
                    "compute_dtype": None,
                    "memory_limit": None,
                }
            ),
            "train": run.config.train.model_copy(update={"dtype": "float32", "load": None}),
        }
    )
    return replace(run, config=config)


def _for_fewer(
    recompute: RecomputeSection | None, layers: int, fewer: int
) -> RecomputeSection | None:
    """The same for a model of fewer layers, each of which stands for as many of the other."""
    if recompute is None:
        return None

    def of_fewer(blocks: Collection[int] | None) -> list[int] | None:
        if blocks is None:
            return None
        return [number for number in range(fewer) if number * layers // fewer in blocks]

    chosen = {key: of_fewer(getattr(recompute, key)) for key in ("blocks", "whole_blocks")}
    return recompute.model_copy(update=chosen)


def _shared(preferred: int, limit: int, devices: int) -> int:
    """The largest number up to `preferred` and `limit` that divides `devices`."""
    return max(n for n in range(1, min(preferred, limit, devices) + 1) if devices % n == 0)


if __name__ == "__main__":
    run_worker(*sys.argv[1:])

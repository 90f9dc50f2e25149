"""The process that measures training steps of plans, which take turns."""

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
"""Steps of each plan before the timed ones, which allocate buffers and open connections."""

BATCH, MICRO_BATCHES = 16, 2
"""Samples per step, and micro-batches: two, so that two stages overlap."""


@dataclass(frozen=True)
class MeasureOrder:
    """The plans of one model to be measured.

    Args:
        config: the expert configuration, whose tiny variant is trained.
        graph: file of the captured graph.
        plans: file of the plan of each alternative.
        rounds: timed steps of each plan.
    """

    config: str
    graph: str
    plans: dict[str, str]
    rounds: int


def measure(order: MeasureOrder, world: World, device: torch.device) -> list[list[float]]:
    """Measures for each plan the seconds of its steps on the slowest process.

    The plans take turns, each round in another order, so that other load on the machine affects all
    of them equally.
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
        for plan_index in in_turn(len(steps), number):
            seconds[plan_index].append(_seconds(steps[plan_index]))
    return seconds


def _step(
    run: Run, plan: Plan, batch: Sequence[Tensor], device: torch.device
) -> Callable[[], object]:
    """Returns the training step of a plan, as the command `train` runs it."""
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
    """Returns the order of `count` plans in a round.

    Each round begins with the next plan; odd rounds go backwards.
    """
    step = -1 if number % 2 else 1
    return [(number + step * plan_index) % count for plan_index in range(count)]


def _seconds(step: Callable[[], object]) -> float:
    """Seconds of a step on the slowest process."""
    step()  # As in training, the timed step follows a step of the same plan.
    dist.barrier()
    started = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


@record
def run_worker(request: str, result: str) -> None:
    """Measures the `MeasureOrder` in the file `request`; rank 0 writes the seconds to `result`."""
    order = MeasureOrder(**json.loads(Path(request).read_text(encoding="utf-8")))
    world = World.from_environment()
    with process_group(world) as device:
        seconds = measure(order, world, device)
        if world.rank == 0:
            Path(result).write_text(json.dumps(seconds), encoding="utf-8")


def tiny_run(run: Run, devices: int) -> Run:
    """Scales an expert configuration down to its tiny variant, in float32 on the built-in text.

    It has at most as many stages as blocks, the model parallelism of the configuration if it
    divides the devices of a stage, and data parallelism over the rest. If the configuration shards
    optimizer state, all parameters are sharded.

    Args:
        run: the run of an expert configuration.
        devices: the number of devices.

    Raises:
        ConfigError: the micro-batch is not divisible by the data parallelism.
    """
    parallel, sizes = run.config.parallel, run.config.model.sizes
    assert parallel.expert is not None and sizes is not None
    large = Dimensions(**sizes)
    tiny = large.tiny()
    stages = _largest_divisor(int(parallel.stages), tiny.num_layers, devices)
    model = _largest_divisor(parallel.expert.model_parallel, tiny.num_kv_heads, devices // stages)
    data, rows = devices // stages // model, BATCH // MICRO_BATCHES
    if rows % data:
        raise ConfigError(
            f"devices={devices}: the micro-batch of the tiny variant has {rows} samples, which"
            f" are not divisible by {data} (data parallelism)\nvalid numbers of devices are 2, 4, 8"
        )
    expert = parallel.expert.model_copy(update={"data_parallel": data, "model_parallel": model})
    # Parameters of the tiny variant are below the default threshold.
    every_size = {"threshold": 0}
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
                    "hsdp": parallel.hsdp and parallel.hsdp.model_copy(update=every_size),
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
    """Scales recomputed blocks down to a model of fewer layers, where layer i is like layer
    i · layers / fewer of the full model."""
    if recompute is None:
        return None

    def of_fewer(blocks: Collection[int] | None) -> list[int] | None:
        if blocks is None:
            return None
        return [number for number in range(fewer) if number * layers // fewer in blocks]

    chosen = {key: of_fewer(getattr(recompute, key)) for key in ("blocks", "whole_blocks")}
    return recompute.model_copy(update=chosen)


def _largest_divisor(preferred: int, limit: int, devices: int) -> int:
    """Returns the largest divisor of `devices` up to `preferred` and `limit`."""
    return max(n for n in range(1, min(preferred, limit, devices) + 1) if devices % n == 0)


if __name__ == "__main__":
    run_worker(*sys.argv[1:])

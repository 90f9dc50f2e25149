"""Worker process that measures training steps of several plans in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright.core.api import parallelize
from shardwright.core.graph.serialize import loads
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.runtime.accelerator import seconds_of
from shardwright.errors import ConfigError, PlanError, ShardwrightError
from shardwright.models.sizes import Dimensions
from shardwright.run.config.run import Run
from shardwright.run.config.schema import RecomputeSection
from shardwright.run.launch.process_group import World, process_group

WARM_UP_STEPS = 2
"""Number of untimed warm-up steps of each plan, which allocate buffers and open connections."""

BATCH_SIZE, MICRO_BATCHES = 16, 2
"""Samples per step, and micro-batches per step: at least two let two stages overlap."""


@dataclass(frozen=True)
class MeasureOrder:
    """Plans of one model whose training steps are measured.

    Args:
        config: path of the expert configuration, whose tiny variant is trained.
        graph: path of the captured graph.
        plans: path of each plan, by the names of its alternatives.
        rounds: number of timed steps of each plan.
    """

    config: str
    graph: str
    plans: dict[str, str]
    rounds: int


def measure(order: MeasureOrder, world: World, device: torch.device) -> list[list[float]]:
    """Measure training steps; return the seconds on the slowest process, by plan and round.

    The plans take turns, each round in another order, so that other load on the machine affects all
    plans equally.

    Raises:
        PlanError: if a plan cannot run.
    """
    run = tiny_run(Run.from_file(order.config), world.size)
    graph = loads(Path(order.graph).read_bytes())
    # There may be more plans than batches.
    batches = cycle(run.batches.epoch(0))
    steps = []
    for name, file in order.plans.items():
        # The file of a plan does not contain its graph.
        plan = replace(Plan.load(file), graph=graph)
        try:
            step = _make_training_step(run, plan, next(batches), device)
            for _ in range(WARM_UP_STEPS):
                step()
        except ShardwrightError as error:
            raise PlanError(
                f"{order.config}: the plan {name!r} cannot run: {error}\n"
                "leave this configuration out of the comparison"
            ) from error
        steps.append(step)
    seconds: list[list[float]] = [[] for _ in steps]
    for round_index in range(order.rounds):
        for plan_index in plan_order(len(steps), round_index):
            seconds[plan_index].append(_measure_seconds_on_slowest_rank(steps[plan_index], device))
    return seconds


def _make_training_step(
    run: Run, plan: Plan, batch: Sequence[Tensor], device: torch.device
) -> Callable[[], object]:
    """Return a function that runs one training step of `plan`, as the command `train` does."""
    net = parallelize(run.model(), plan, device)
    assert isinstance(net, ParallelModule)
    optimizer = run.optimizer(net)
    # Moved once, so that no timed step includes the transfer.
    local_batch = [tensor.to(device) for tensor in batch]

    def step() -> None:
        net.train_step(*local_batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plan_order(num_plans: int, round_index: int) -> list[int]:
    """Return the order of the plans in a round, as indices.

    Round r begins with plan r modulo `num_plans`; odd rounds run in reverse order.
    """
    step = -1 if round_index % 2 else 1
    return [(round_index + step * index) % num_plans for index in range(num_plans)]


def _measure_seconds_on_slowest_rank(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a step on the slowest process."""
    step()  # Untimed: as in training, the timed step follows a step of the same plan.
    # All processes begin the timed step together.
    dist.barrier()
    # NCCL reduces tensors of accelerators only, some of which have no float64.
    seconds = torch.tensor(seconds_of(step, device), dtype=torch.float32, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


# `record` writes an exception to the file from which the launcher reads it.
@record
def run_worker(request: str, result: str) -> None:
    """Measure the `MeasureOrder` in file `request`; rank 0 writes the seconds to file `result`."""
    order = MeasureOrder(**json.loads(Path(request).read_text(encoding="utf-8")))
    world = World.from_environment()
    with process_group(world) as device:
        seconds = measure(order, world, device)
        # The same on all ranks, as the maximum is taken over them.
        if world.rank == 0:
            Path(result).write_text(json.dumps(seconds), encoding="utf-8")


def tiny_run(run: Run, devices: int) -> Run:
    """Scale an expert configuration down to its tiny variant, in float32 on the built-in text.

    Reduces the configuration's degrees of pipeline and tensor parallelism to divisors of `devices`
    that the tiny model allows; data parallelism uses all other devices. Reduces the degree of
    expert parallelism to a divisor of the tiny model's number of experts. Stages have equal numbers
    of blocks. With ZeRO, parameters of every size are sharded.

    Args:
        run: the run of an expert configuration.
        devices: number of devices.

    Raises:
        ConfigError: if the micro-batch is not divisible by the data parallelism.
    """
    parallel, sizes = run.config.parallel, run.config.model.sizes
    assert parallel.expert is not None and sizes is not None
    large = Dimensions(**sizes)
    tiny = large.tiny()
    # A stage needs at least one block.
    stages = _find_largest_divisor(int(parallel.stages), tiny.num_layers, devices)
    # Tensor parallelism shards heads, of which keys and values have the fewest.
    model = _find_largest_divisor(
        parallel.expert.model_parallel, tiny.num_kv_heads, devices // stages
    )
    # `context_parallel` is 1, which `expert_run` has checked.
    data, rows = devices // stages // model, BATCH_SIZE // MICRO_BATCHES
    if rows % data:
        raise ConfigError(
            f"devices={devices}: the micro-batch of the tiny variant has {rows} samples, which"
            f" are not divisible by {data} (data parallelism)\nuse 2, 4 or 8 devices"
        )
    expert = parallel.expert.model_copy(
        update={
            "data_parallel": data,
            "model_parallel": model,
            "expert_parallel": gcd(parallel.expert.expert_parallel, tiny.num_experts, data * model),
            "layers": None,
        }
    )
    # All parameters of the tiny variant are smaller than the default threshold.
    every_size = {"threshold": 0}
    config = run.config.model_copy(
        update={
            "model": run.config.model.model_copy(update={"sizes": vars(tiny)}),
            "data": run.config.data.model_copy(
                update={"seq_length": tiny.seq_length, "batch_size": BATCH_SIZE, "path": None}
            ),
            "parallel": parallel.model_copy(
                update={
                    "expert": expert,
                    "stages": stages,
                    "micro_batches": MICRO_BATCHES,
                    "hsdp": parallel.hsdp and parallel.hsdp.model_copy(update=every_size),
                    "recompute": _scale_recomputed_blocks(
                        parallel.recompute, large.num_layers, tiny.num_layers
                    ),
                    # Those of the accelerator for which the configuration is written.
                    "compute_dtype": None,
                    "memory_limit": None,
                }
            ),
            # The weights to load are those of the large model.
            "train": run.config.train.model_copy(update={"dtype": "float32", "load": None}),
        }
    )
    return replace(run, config=config)


def _scale_recomputed_blocks(
    recompute: RecomputeSection | None, layers: int, tiny_layers: int
) -> RecomputeSection | None:
    """Map the recomputed blocks of a model with `layers` blocks to those of its tiny variant."""
    if recompute is None:
        return None

    def scale(blocks: Collection[int] | None) -> list[int] | None:
        if blocks is None:
            return None
        # Block b of the tiny model stands for block b · layers // tiny_layers.
        return [block for block in range(tiny_layers) if block * layers // tiny_layers in blocks]

    changes: dict[str, Any] = {
        key: scale(getattr(recompute, key)) for key in ("blocks", "whole_blocks")
    }
    if isinstance(recompute.operators, dict):
        operators = recompute.operators.items()
        changes["operators"] = {op_type: scale(blocks) for op_type, blocks in operators}
    return recompute.model_copy(update=changes)


def _find_largest_divisor(preferred: int, limit: int, devices: int) -> int:
    """Return the largest divisor of `devices` that is at most `preferred` and `limit`."""
    return max(n for n in range(1, min(preferred, limit, devices) + 1) if devices % n == 0)


if __name__ == "__main__":
    run_worker(*sys.argv[1:])

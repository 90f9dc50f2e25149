"""What `bench_bubbles` runs on every rank: how long it computes in a step, and how long that is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import shardwright as sw
from benchmarks.slow import Chain, slept
from shardwright.core.cost.pipeline_timeline import ChunkSeconds
from shardwright.core.partition.pipeline_spec import PipelineSpec

STEPS = 2


def main(file: str, described: str) -> None:
    dist.init_process_group("gloo")
    found: list[float] = []
    for case in json.loads(described):
        pipeline = PipelineSpec(**case["pipeline"])
        found.append(bubble(pipeline, [ChunkSeconds(**each) for each in case["parts"]]))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


def described(pipeline: PipelineSpec, parts: list[ChunkSeconds]) -> dict[str, object]:
    """A case as `main` reads it."""
    return {"pipeline": asdict(pipeline), "parts": [asdict(each) for each in parts]}


def bubble(pipeline: PipelineSpec, parts: list[ChunkSeconds]) -> float:
    """The share of all stages' time in which they do not compute; of some steps the median."""
    net, x = Chain(parts), torch.zeros(pipeline.micro_batches, 16)
    plan = sw.plan(
        # A sum, since a mean needs operators that are known to be linear.
        sw.Pipeline(net, pipeline.micro_batches, loss_reduction="sum"),
        (x,),
        devices=pipeline.stages,
        mode="stand_alone",
        stages=pipeline.stages,
        schedule=pipeline.schedule,
        stage_config={
            f"blocks.{number}": pipeline.stage_of(number) for number in range(pipeline.num_chunks)
        },
    )
    parallel = sw.parallelize(net, plan, "cpu", copy=True)
    parallel.train_step(x)
    return median(_step(parallel, x) for _ in range(STEPS))


def _step(parallel: torch.nn.Module, x: torch.Tensor) -> float:
    dist.barrier()
    slept.clear()
    started = time.perf_counter()
    parallel.train_step(x)
    mine = torch.tensor([sum(slept), time.perf_counter() - started])
    every = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    busy, took = torch.stack(every).T
    return 1 - float(busy.mean() / took.max())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What `test_tiny_files.py` runs on every rank: ten steps of every tiny model, full and LoRA."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from shardwright.core.api import parallelize
from shardwright.run.config import Run
from shardwright.run.config.objects import build_schedule
from shardwright.run.config.schema import LoraSection
from shardwright.run.launch.process_group import World, process_group

TINY = Path(__file__).parents[2] / "configs" / "tiny"
# Those that differ when they are tiny.
NAMES = (
    "llama2_7b",
    "llama2_70b",
    "qwen_7b",
    "baichuan2_7b",
    "baichuan2_13b",
    "pangualpha_2_6b",
)
STEPS = 10


def run_of(name: str, lora: bool) -> Run:
    """The run of a file in double precision, also with adapters."""
    run = Run.from_file(TINY / f"{name}.yaml")
    model = run.config.model.model_copy(update={"lora": LoraSection(rank=8)} if lora else {})
    train = run.config.train.model_copy(update={"dtype": "float64"})
    return replace(run, config=run.config.model_copy(update={"model": model, "train": train}))


def history(name: str, lora: bool, world: int) -> list[float]:
    """The losses of the first steps of a run on so many devices."""
    run = run_of(name, lora)
    net = run.model()
    if world > 1:
        net = parallelize(net, run.plan(world))
    optimizer, schedule = run.optimizer(net), build_schedule(run.config.optimizer)
    assert schedule is not None
    batches = chain.from_iterable(run.batches.epoch(epoch) for epoch in range(STEPS))
    losses = []
    for step, batch in zip(range(STEPS), batches, strict=False):
        loss = net(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, run.num_steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_environment()
    with process_group(world):
        found = {
            f"{name} {lora}": history(name, lora, world.size)
            for name in NAMES
            for lora in (False, True)
        }
        if world.rank == 0:
            out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

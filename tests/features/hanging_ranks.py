"""What `test_faults.py` runs on two ranks, of which one does not come to a collective.

hanging_ranks.py call|forward|gradients|backward|stages FOLDER
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import shardwright as sw
from shardwright.run import World, process_group


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x))).square().sum()


def meet(rank: int, folder: Path) -> None:
    """Until both ranks are here: on a busy machine one may start much later than the other."""
    (folder / str(rank)).touch()
    while not all((folder / str(other)).exists() for other in range(2)):
        time.sleep(0.01)


@record
def main(where: str, folder: Path) -> None:
    """Features are cut in one layer and the batch in the next: redistributions lie between,
    forward and backward."""
    net, x = Loss(), torch.ones(4, 4, requires_grad=where != "stages")
    if where == "stages":
        pipeline = sw.Pipeline(net, 2, loss_reduction="sum")
        plan = sw.plan(pipeline, (x,), devices=2, stages=2)
    else:
        sw.shard(net.inner, in_strategy=((1, 1), (2, 1)))
        sw.shard(net.outer, in_strategy=((1, 2), (1, 2)))
        plan = sw.plan(net, (x,), devices=2, mode="semi_auto")
    world = World.from_environment()
    meet(world.rank, folder)
    with process_group(world, timeout=timedelta(seconds=10)) as device:
        parallel = sw.parallelize(net, plan, device, copy=True)
        # Unexpected calls wait for all ranks before they communicate.
        for _ in range(3):
            parallel.train_step(x)
        if world.rank == 1 and where == "stages":
            time.sleep(100)
        if where == "stages":
            parallel.train_step(x)
        # The first ten backward passes begin with a comparison of gradients.
        for _ in range(12 if where == "backward" else 3):
            parallel(x).backward()
        if world.rank == 1 and where in ("call", "forward"):
            time.sleep(100)
        # Calls of new shapes are compared before they run.
        loss = parallel(x[:2] if where == "call" else x)
        if world.rank == 1:
            time.sleep(100)
        loss.backward()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

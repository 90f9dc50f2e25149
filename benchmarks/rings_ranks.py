"""What `bench_rings.py` runs on every rank: steps of a model whose attention is cut in one way."""

from __future__ import annotations

import argparse
import json
import os
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from benchmarks.data_parallel_ranks import seconds_of, with_update

HEADS, SIZE, WORDS = 4, 64, 64


def strategies(devices: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Each way to cut attention by its name, for queries, keys and values."""
    whole, blocks = (1, 1, 1, 1), (1, 1, devices, 1)
    return {
        "heads": ((1, devices, 1, 1),) * 3,
        "keys gathered": (blocks, whole, whole),
        "ring": (blocks, blocks, blocks),
    }


class OneLayer(nn.Module):
    """Words, causal attention and the loss of the next word."""

    def __init__(self, strategy: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HEADS * SIZE)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.attention = sw.shard(F.scaled_dot_product_attention, strategy)
        self.out = nn.Linear(HEADS * SIZE, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.qkv(self.words(ids)).unflatten(-1, (3, HEADS, SIZE)).movedim(-3, 0)
        y = self.attention(*parts.transpose(2, 3), is_causal=True)
        logits = self.out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    devices = dist.get_world_size()
    net: Any = OneLayer(strategies(devices)[asked.way])
    ids = torch.randint(WORDS, (1, asked.tokens))
    plan = sw.plan(net, (ids,), devices=devices, cluster="local")
    net = sw.parallelize(net, plan, "cpu")
    step = with_update(net, lambda: net.train_step(ids))
    before = getrusage(RUSAGE_SELF).ru_maxrss
    losses = [float(step())]
    seconds = [seconds_of(step) for _ in range(asked.rounds)]
    peak = 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)
    if dist.get_rank() == 0:
        memory = plan.memory
        assert memory is not None
        facts = {"seconds": seconds, "peak": peak, "planned": memory.peak, "bytes": plan.bytes}
        print(json.dumps({**facts, "loss": losses[0]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

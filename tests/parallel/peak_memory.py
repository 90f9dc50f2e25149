"""Prints the peak memory of `parallelize` in multiples of the model's parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from resource import RUSAGE_SELF, getpagesize, getrusage

import torch
from torch import nn

import shardwright as sw


def in_use() -> int:
    """Bytes that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32)))
batch = torch.ones(1, 2048)
plan = sw.plan(net, (batch,), devices=1)
size = sum(p.nbytes for p in net.parameters())
before = in_use()
net = sw.parallelize(net, plan, release="release" in sys.argv)
print((getrusage(RUSAGE_SELF).ru_maxrss * 1024 - before) / size)

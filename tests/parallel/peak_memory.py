"""Prints by how much `parallelize` raises the peak of memory, in multiples of the parameters.

Values are made last: a kernel may take away pages that rest for long.
"""

from __future__ import annotations

import sys
from resource import RUSAGE_SELF, getrusage

import torch
from torch import nn

import shardwright as sw


def peak() -> int:
    """Bytes that this process had at most."""
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024


with torch.device("meta"):
    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32)))
plan = sw.plan(net, (torch.ones(1, 2048),), devices=1)
net.to_empty(device="cpu")
for parameter in net.parameters():
    nn.init.ones_(parameter)
size = sum(p.nbytes for p in net.parameters())
before = peak()
net = sw.parallelize(net, plan, release="release" in sys.argv)
print((peak() - before) / size)

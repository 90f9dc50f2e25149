from __future__ import annotations

import torch
from torch import nn

from random_plans import check_random_plan, random_plan
from shardwright.core.capture.capture import capture


def test_a_batch_norm_without_momentum_averages_all_batches() -> None:
    norm = nn.BatchNorm1d(8, momentum=None)
    net, args = nn.Sequential(nn.Linear(8, 8), norm, norm, nn.Tanh()), (torch.randn(8, 8),)
    graph = capture(net, args)
    assert norm.momentum is None
    for seed in range(2):
        check_random_plan(net, args, {}, graph, random_plan(graph, 4, seed))

"""Calls a model with a token and a class that it does not have, on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.table(ids)).flatten(0, 1)
        return nn.functional.cross_entropy(scores, labels.flatten())


dist.init_process_group("gloo")
torch.manual_seed(0)
ids = torch.arange(64).view(8, 8)
labels = ids.clone()
labels[1, :4] = -100
net = Words()
wanted = net(ids, labels).item()
plan = sw.plan(net, (ids, labels), devices=2, mem_coeff=1e4)
assert plan.cuts["table"] == {"v": (0,)} and plan.cuts["cross_entropy"] == {"v": (0,)}
net = sw.parallelize(net, plan)
assert abs(net(ids, labels).item() - wanted) < 1e-6
for place in (0, 1):
    for number in (64, -1):
        batch = [ids.clone(), labels.clone()]
        batch[place][0, 0] = number
        try:
            net(*batch)
        except sw.DataError as error:
            assert "an index in the batch is out of range" in str(error)
        else:
            raise AssertionError((place, number))
dist.barrier()  # No rank has failed.
if dist.get_rank() == 0:
    print("refused on all ranks")
dist.destroy_process_group()

"""What a plan communicates, and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from random_plans import check_random_plan
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import make_plan
from shardwright.core.search.baselines import data_parallel


class Largest(nn.Module):
    """Nothing reads where the largest elements are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = self.head(x).topk(4, dim=1)
        return values.sum()


def test_an_output_that_nothing_reads_is_not_redistributed() -> None:
    net, x, mesh = Largest(), torch.randn(4, 8), prime_mesh(2)
    graph = sw.capture(net, (x,))
    (topk,) = (op for op in graph.ops if len(op.outputs) == 2)
    cuts, whole = {topk.name: {"b": (0,)}}, ((), ())
    storage = default_storage(graph, mesh, cuts)
    decisions = Decisions(cuts, storage, {topk.name: (whole, whole)})
    partitioned = Partitioned(graph, mesh, decisions)
    plan = make_plan(partitioned, mode="pinned", options={}, search_seconds=0.0, training=True)
    assert list(partitioned.chunks[0].communication.leading_transfers) == [topk.outputs[0]]
    check_random_plan(net, (x,), {}, graph, plan)


@pytest.mark.parametrize(("width", "num_buckets"), [(256, 2), (512, 2), (4096, 8)])
def test_a_program_has_buckets_whose_reduction_overlaps_unless_they_are_small(
    width: int, num_buckets: int
) -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
        graph = sw.capture(net, (torch.zeros(4, width),))
    mesh = prime_mesh(2)
    cuts = data_parallel(graph, mesh)
    storage = default_storage(graph, mesh, cuts)
    (chunk,) = Partitioned(graph, mesh, Decisions(cuts, storage)).chunks
    assert len(chunk.communication.buckets) == num_buckets


def test_buckets_are_of_equal_size_however_the_sizes_of_parameters_alternate() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 1024), nn.Linear(1024, 512))]
    with torch.device("meta"):
        net = nn.Sequential(*layers, nn.Linear(512, 8))
        graph = sw.capture(net, (torch.zeros(4, 512),))
    mesh = prime_mesh(2)
    cuts = data_parallel(graph, mesh)
    (chunk,) = Partitioned(graph, mesh, Decisions(cuts, default_storage(graph, mesh, cuts))).chunks
    sizes = [
        sum(member.value.numel for member in bucket.members)
        for bucket in chunk.communication.buckets
    ]
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)

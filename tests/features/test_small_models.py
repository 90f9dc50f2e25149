"""Small models with few tokens, where latencies decide, against every division by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.core.capture.annotations import module_tags
from shardwright.core.graph.graph import Graph
from shardwright.models import Dimensions
from shardwright.models.build import build
from shardwright.models.expert_sharding import pin_expert

DEVICES = 8
CLUSTER = "h100"


def _seconds(graph: Graph, mode: str) -> float:
    seconds = sw.plan(graph, devices=DEVICES, cluster=CLUSTER, mode=mode).step_time
    assert seconds is not None
    return seconds


def _by_hand(net: torch.nn.Module, graph: Graph, batch: int) -> Iterator[float]:
    """Data × tensor parallel, with and without norms cut along the sequence."""
    for tensor in (n for n in (1, 2, 4, 8) if DEVICES // n <= batch):
        for along_sequence in (False, True)[: min(tensor, 2)]:
            pin_expert(
                net,
                data_parallel=DEVICES // tensor,
                model_parallel=tensor,
                seq_parallel=along_sequence,
            )
            pinned = replace(graph, module_tags=module_tags(net))
            yield _seconds(pinned, "sharding_propagation")


@pytest.mark.parametrize("width", [256, 1024])
@pytest.mark.parametrize(("batch", "length"), [(1, 128), (4, 64), (8, 512)])
def test_they_are_planned_within_two_percent_of_the_best_division_by_hand(
    width: int, batch: int, length: int
) -> None:
    sizes = Dimensions(
        family="llama",
        hidden_size=width,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        intermediate_size=4 * width,
        vocab_size=32000,
        seq_length=length,
        norm_eps=1e-5,
    )
    with torch.device("meta"):
        net, ids = build(sizes), torch.empty(batch, length, dtype=torch.long)
    graph = sw.capture(net, (ids, ids), compute_dtype=torch.bfloat16)
    best = min(_by_hand(net, graph, batch))
    assert _seconds(graph, "recursive_programming") <= 1.02 * best

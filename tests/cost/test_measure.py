"""What is measured of this machine is what the time model counts."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from shardwright.capture.capture import capture
from shardwright.cost.cluster import Cluster, Device
from shardwright.cost.collectives import Links
from shardwright.cost.flops import work_of
from shardwright.cost.measure import (
    BLOCKS,
    CPU,
    LARGE_MESSAGE,
    OPERATORS,
    SmallTransformer,
    link_of,
)
from shardwright.layout.layout import Layout
from shardwright.runtime.collectives import identity


class Blocks(nn.Module):
    def __init__(self, small: SmallTransformer) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(small.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, identity, identity)
        return x.sum()


def test_a_block_has_as_many_operators_as_the_time_model_counts() -> None:
    small = SmallTransformer(CPU)
    works = [work_of(op) for op in capture(Blocks(small), (small.x,), {}).ops]
    forward = sum(bool(work.forward_bytes) for work in works)
    gradients = sum(work.gradients for work in works if work.backward_bytes)
    # The sum at the end is one more of each.
    assert forward + gradients == OPERATORS * BLOCKS + 2


def test_a_small_transformer_trains() -> None:
    small = SmallTransformer(CPU)
    small.train()
    assert small.x.grad is not None and small.x.grad.abs().sum() > 0


def cluster(processes: int, short: float, long: float, pair: float) -> Cluster:
    device = Device(memory=1, rates={"float32": 1.0}, memory_bandwidth=1.0, at_full_rate=1)
    return Cluster("local", device, (link_of(processes, short, long, pair),))


def test_a_link_takes_as_long_as_was_measured() -> None:
    # A call of 2 ms and messages of 1 ms: 7 of a gather, 14 of a reduction that scatters.
    found = cluster(8, short=2e-3 + 10.5e-3, long=116e-3, pair=2e-3 + 1.5e-3)
    links = Links(found, Layout((2, 4), ("a", "b")))
    assert found.levels[0].call == pytest.approx(2e-3 / 8)
    assert found.levels[0].latency == pytest.approx(1e-3 / 8)
    assert links.seconds("all_gather", (0, 1), 0) == pytest.approx(9e-3)
    assert links.seconds("all_gather", (0,), 0) == pytest.approx(3e-3)
    assert links.seconds("all_reduce", (0, 1), 4 * LARGE_MESSAGE) == pytest.approx(116e-3)
    # Two processes wait for one turn, not for seven.
    pair = Links(found, Layout((2,), ("a",)))
    assert pair.seconds("all_gather", (0,), 0) == pytest.approx(3e-3 / 4)


def test_two_processes_tell_no_call_from_its_messages() -> None:
    found = cluster(2, short=3e-3, long=10e-3, pair=3e-3).levels[0]
    assert (found.call, found.latency) == (0.0, pytest.approx(2e-3 / 2))


def test_a_call_that_seems_to_take_less_than_its_messages_takes_no_time() -> None:
    found = cluster(8, short=20e-3, long=40e-3, pair=1e-3).levels[0]
    assert found.call == 0.0
    assert found.latency == pytest.approx(19e-3 / 9 / 8)

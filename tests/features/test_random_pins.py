"""Random pins on random graphs: pins are kept, values and gradients are those of one device."""

from __future__ import annotations

import random

import pytest

import shardwright as sw
from random_cases import random_cases
from random_graphs import random_net
from random_plans import random_layouts_of_layers
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh

MODES = ("semi_auto", "sharding_propagation", "recursive_programming")


@pytest.mark.parametrize("mode", MODES)
@random_cases(5, slow=20)
def test_random_pins_are_kept_and_change_no_result(mode: str, seed: int) -> None:
    draw, devices = random.Random(seed), (2, 4, 6, 8, 12)[seed % 5]
    net, args = random_net(seed)
    graph, mesh = sw.capture(net, args), prime_mesh(devices)
    pinned: dict[str, tuple[tuple[int, ...], ...]] = {}
    for module, op, layouts in random_layouts_of_layers(net, graph, mesh, seed):
        if draw.random() < 0.4:
            continue
        counts = tuple(layout.shard_counts for layout in layouts)
        exact = draw.random() < 0.5
        entries = tuple(TensorLayout(mesh, layout.axes) for layout in layouts) if exact else counts
        sw.shard(module, entries)
        pinned[op.name] = counts
    if not pinned:
        return
    plan = sw.plan(net, args, devices=devices, mode=mode)
    for name, counts in pinned.items():
        assert plan.strategies[name] == counts, f"{name}\n{plan}"
    result = sw.check(net, args, {}, plan)
    assert result.passes(1e-9), f"{result}\n{plan.text(every=True)}"

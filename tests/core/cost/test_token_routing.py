"""Tokens that are sent to their experts only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.core.cost.cluster import LinkLevel
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.collectives import Links
from shardwright.core.cost.predict import predict
from shardwright.core.cost.step_time import activation_seconds, hidden_seconds
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.cost.token_routing import routed_steps
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.overlap import Overlap
from shardwright.core.partition.partitioned import Partitioned
from tools.compare.test_published_rows import planned

MIXTURE = {"family": "mixtral", "experts": 8, "experts_per_token": 2, "sharded": "none"}


def partitioned(**changes: Any) -> Partitioned:
    return planned(**{**MIXTURE, **changes}).candidate.partitioned


@pytest.mark.parametrize(("devices", "share"), [(2, 1.0), (4, 0.5), (8, 0.25)])
def test_a_token_reaches_as_many_devices_as_it_has_experts(devices: int, share: float) -> None:
    plan = partitioned(data_parallel=8, expert_parallel=devices)
    (chunk,) = plan.chunks
    steps = routed_steps(chunk.graph, chunk.communication, chunk.decisions.cuts)
    operations = {t.step.operation for t, step in steps.items() if step.fraction == share}
    assert {"all_gather", "reduce_scatter"} <= operations
    assert {step.fraction for step in steps.values()} <= {share, 0.0}
    assert {step.copies for step in steps.values() if step.fraction} == {2.0}


def test_a_token_sent_once_reaches_fewer_devices_if_one_has_several_of_its_experts() -> None:
    plan = partitioned(data_parallel=8, expert_parallel=4)
    (chunk,) = plan.chunks
    flow, cuts = chunk.communication, chunk.decisions.cuts
    once, copies = (
        max(step.fraction for step in routed_steps(chunk.graph, flow, cuts, each).values())
        for each in (True, False)
    )
    # Of 4 devices both experts of a token are on one with probability 1/4.
    assert (once, copies) == (pytest.approx(1.75 / 4), 2 / 4)


def test_only_devices_that_send_routed_tokens_are_predicted_so() -> None:
    plan = partitioned(data_parallel=8, expert_parallel=8)
    h100 = load_cluster("h100")
    routing = replace(h100, device=replace(h100.device, sends_routed_tokens=True))
    (gathered,), (routed,) = (predict(plan, each, True).chunks for each in (h100, routing))
    assert routed.forward_redistributions < gathered.forward_redistributions
    assert routed.forward == gathered.forward


def test_no_more_of_a_redistribution_is_hidden_than_routed_tokens_take() -> None:
    plan = partitioned(data_parallel=8, expert_parallel=8)
    (chunk,) = plan.chunks
    flow, cuts = chunk.communication, chunk.decisions.cuts
    h100 = load_cluster("h100")
    device = replace(h100.device, sends_routed_tokens=True)
    model = TimeModel(replace(h100, device=device), plan.mesh)
    steps = routed_steps(chunk.graph, flow, cuts)
    everything = chunk.graph.ops
    overlaps = {transfer: Overlap(everything, ()) for transfer in steps}
    hidden = hidden_seconds(chunk.graph, flow, cuts, model, overlaps)
    seconds = {
        transfer: pair for transfer, _, pair in activation_seconds(chunk.graph, flow, cuts, model)
    }
    assert any(any(pair) for pair in hidden.values())
    for transfer, pair in hidden.items():
        assert all(h <= s for h, s in zip(pair, seconds.get(transfer, pair), strict=True))


def test_kernels_that_send_tokens_reach_their_own_bandwidth_within_a_node() -> None:
    plan = partitioned(data_parallel=8, expert_parallel=8)
    h100 = load_cluster("h100")
    by_collectives = replace(h100, device=replace(h100.device, sends_routed_tokens=True))
    link = replace(h100.levels[0], latency=0.0)
    fast = replace(by_collectives, levels=(link,))
    device = replace(fast.device, dispatch_efficiency=2 / 3 * link.efficiency)
    seconds, slower = (
        predict(plan, each, True).chunks[0].forward_redistributions
        for each in (fast, replace(fast, device=device))
    )
    assert slower > 1.2 * seconds


def test_all_copies_of_a_token_for_another_node_pass_between_the_nodes() -> None:
    levels = LinkLevel("fast", 1e9, 0.0, devices=4), LinkLevel("slow", 1.0, 0.0)
    nodes = replace(load_cluster("h100"), levels=levels)
    links = Links(nodes, DeviceMatrix((2, 4), ("node", "device")))
    # 4 of 8 devices are in another node: of 2 copies of a token, 1 goes there on average.
    assert links.dispatch_seconds((0, 1), 8.0, 2, once=False) == pytest.approx(8.0)
    # Sent once to a node, it goes there unless both experts are in its own.
    assert links.dispatch_seconds((0, 1), 8.0, 2, once=True) == pytest.approx(8.0 * 0.75)
    # An all-gather divides the tokens of the other node over the four devices.
    assert links.seconds("all_gather", (0, 1), 64.0) == pytest.approx(8.0)
    assert links.dispatch_seconds((1,), 8.0, 2, once=False) < 1e-6

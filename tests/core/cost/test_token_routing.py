"""Tokens that are sent to their experts only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.core.cost.step_time import activation_seconds, hidden_seconds
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.cost.token_routing import routed_shares
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
    shares = routed_shares(chunk.graph, chunk.communication, chunk.decisions.cuts)
    operations = {transfer.step.operation for transfer, found in shares.items() if found == share}
    assert {"all_gather", "reduce_scatter"} <= operations
    assert set(shares.values()) <= {share, 0.0}


def test_a_token_sent_once_reaches_fewer_devices_if_one_has_several_of_its_experts() -> None:
    plan = partitioned(data_parallel=8, expert_parallel=4)
    (chunk,) = plan.chunks
    flow, cuts = chunk.communication, chunk.decisions.cuts
    once, copies = (
        max(routed_shares(chunk.graph, flow, cuts, each).values()) for each in (True, False)
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
    shares = routed_shares(chunk.graph, flow, cuts)
    everything = chunk.graph.ops
    overlaps = {transfer: Overlap(everything, ()) for transfer in shares}
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
    # The same group within a node of eight, and over nodes of two.
    small_node = replace(link, devices=2)
    for levels, is_faster in (((link,), True), ((small_node, h100.levels[1]), False)):
        slow = replace(by_collectives, levels=levels)
        device = replace(slow.device, dispatch_efficiency=2 / 3 * link.efficiency)
        seconds, slower = (
            predict(plan, each, True).chunks[0].forward_redistributions
            for each in (slow, replace(slow, device=device))
        )
        assert (slower > 1.2 * seconds) == is_faster
        assert slower == pytest.approx(seconds) or is_faster

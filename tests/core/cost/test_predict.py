"""Timelines of plans: parts take as long as their operations, or as a cluster says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.memory import bytes_text
from shardwright.core.cost.optimizer_state import orthogonalized_parameters
from shardwright.core.cost.predict import chunk_times, min_step_seconds, predict
from shardwright.errors import PlanError
from tools.compare.test_published_rows import planned


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        x = torch.empty(4096, 1024)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).mean()

    return sw.plan(Mean(), (x,), devices=2, mode="stand_alone", stages=2, micro_batches=4)


def test_equal_parts_wait_as_the_literature_says(plan: sw.Plan) -> None:
    # 1F1B of two stages and four micro-batches. The first part has one gradient less to compute.
    assert plan.timeline().bubble == pytest.approx(1 / 5, abs=0.05)
    forward = plan.timeline().stages[0][0]
    assert forward.end == pytest.approx(2 * 2 * 1024 * 1024 * 1024 / 1e9)


def test_on_a_cluster_actions_take_seconds_and_messages_take_time(plan: sw.Plan) -> None:
    line = plan.timeline(load_cluster("h100"))
    first, second = (spans[0] for spans in line.stages)
    assert 0 < first.end < 1e-3
    assert second.start > first.end
    assert 0 < line.bubble < 0.5


def test_devices_that_hold_the_same_activation_send_its_parts() -> None:
    # Without sequence parallel both devices of a stage hold the whole activation.
    run = planned(data_parallel=1, tensor_parallel=2, stages=2, devices=4, sharded="none")
    partitioned = run.candidate.partitioned
    # Each stage is a node. Without latencies the bytes decide.
    node, network = (replace(level, latency=0.0) for level in load_cluster("h100").levels)
    whole = replace(load_cluster("h100"), levels=(replace(node, devices=2), network))
    divided = replace(whole, device=replace(whole.device, divides_sends=True))
    for cluster, copies in ((whole, 1), (divided, 2)):
        assert chunk_times(partitioned, cluster)[0].copies == copies
    first, second = (predict(partitioned, each).timeline for each in (whole, divided))
    assert first is not None and second is not None
    sent = partitioned.chunks[0].border_bytes[0]
    waits = [line.stages[1][0].start - line.stages[0][0].end for line in (first, second)]
    assert waits[0] == pytest.approx(sent / network.rate)
    assert waits[1] == pytest.approx(sent / 2 / network.rate + sent / 2 / node.rate)


def test_stages_that_exchange_messages_in_turn_compute_nothing_meanwhile() -> None:
    run = planned(data_parallel=1, stages=2, devices=2, sharded="none", global_batch=16)
    partitioned = run.candidate.partitioned
    node, network = (replace(level, latency=1e-3) for level in load_cluster("h100").levels)
    beside = replace(load_cluster("h100"), levels=(replace(node, devices=1), network))
    in_turn = replace(beside, device=replace(beside.device, exchanges_in_turn=True))
    sent = partitioned.chunks[0].border_bytes[0]
    send = network.latency + sent / network.rate
    first, second = (predict(partitioned, each).timeline for each in (beside, in_turn))
    assert first is not None and second is not None
    # The first message takes as long: both passes include it.
    assert second.stages[1][0].end == pytest.approx(first.stages[1][0].end)
    busy = [sum(span.end - span.start for span in line.stages[0]) for line in (first, second)]
    # An activation and a gradient for each micro-batch.
    assert busy[1] - busy[0] == pytest.approx(2 * run.run.micro_batches * send)
    assert second.seconds > first.seconds
    for each in (beside, in_turn):
        assert min_step_seconds(partitioned, each, chunk_times(partitioned, each)) <= (
            predict(partitioned, each).seconds
        )


def test_stages_that_share_a_processor_leave_it_to_each_other_where_they_wait(
    plan: sw.Plan,
) -> None:
    apart = load_cluster("h100")
    shared = replace(apart, device=replace(apart.device, at_full_rate=1))
    found = predict(plan.partitioned, shared)
    assert found.timeline is not None and found.bubble > 0.1
    link, micro_batches = apart.levels[0], plan.pipeline.micro_batches
    # Each message waits for the turn of who sends it.
    sending = 2 * micro_batches * (2 * link.latency + 4096 * 1024 * 4 / 4 / link.rate)
    busy = sum(chunk.computation for chunk in found.chunks)
    assert found.seconds == pytest.approx((busy + sending) / 2)
    assert found.seconds > predict(plan.partitioned, apart).computation


def test_each_pass_of_a_stage_takes_its_overhead(plan: sw.Plan) -> None:
    quick = load_cluster("h100")
    slow = replace(quick, device=replace(quick.device, pass_overhead=1.0))
    passes = 2 * plan.pipeline.micro_batches
    # The second stage waits for the first forward pass, and the first for the last backward pass.
    seconds = predict(plan.partitioned, slow).seconds
    assert seconds == pytest.approx(predict(plan.partitioned, quick).seconds + passes + 2, rel=0.01)


def test_each_step_of_a_pipeline_takes_its_overhead_once(plan: sw.Plan) -> None:
    quick = load_cluster("h100")
    for at_full_rate, times in ((None, 1), (1, plan.devices)):
        device = replace(quick.device, at_full_rate=at_full_rate)
        before = predict(plan.partitioned, replace(quick, device=device)).seconds
        device = replace(device, step_overhead=1.0)
        after = predict(plan.partitioned, replace(quick, device=device)).seconds
        assert after == pytest.approx(before + times)


class Tied(nn.Module):
    """The table of the embedding is read by the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).square().mean()


def test_stages_that_share_a_parameter_sum_its_gradients_after_the_backward_pass() -> None:
    tokens = torch.zeros(8, 4, dtype=torch.long)
    made = sw.plan(Tied(), (tokens,), devices=2, mode="stand_alone", stages=2, micro_batches=4)
    apart = load_cluster("h100")
    slow = replace(apart, levels=tuple(replace(level, bandwidth=1e6) for level in apart.levels))
    link = slow.levels[0]
    found = predict(made.partitioned, slow)
    gradient = 2 * (link.latency + 512 * 64 * 4 / 2 / link.rate)
    assert found.timeline is not None
    rest = max(chunk.exposed + chunk.update for chunk in found.chunks)
    assert found.seconds == pytest.approx(found.timeline.seconds + rest + gradient)


def test_the_text_of_a_plan_says_what_each_stage_needs_and_waits(plan: sw.Plan) -> None:
    text = " ".join(plan.text(full=True).split())
    most, least = sorted(plan.memory.stages, key=lambda stage: -stage.peak)
    for part in (
        f"memory {bytes_text(most.peak)} per device of stage {most.stage}, with adamw",
        f"memory at the peak of stage {most.stage}: ",
        f"peak memory of the other stage: {bytes_text(least.peak)} (stage {least.stage})",
        "pipeline bubbles: ",
    ):
        assert part in text


def test_a_plan_from_a_file_has_nothing_to_rehearse(plan: sw.Plan) -> None:
    loaded = sw.Plan.from_json(plan.to_json())
    assert "peak memory" not in str(loaded)
    with pytest.raises(PlanError, match="has no graph, which a dry run needs"):
        loaded.timeline()
    with pytest.raises(PlanError, match="has no graph, which a dry run needs"):
        _ = loaded.memory


def test_muon_takes_the_products_of_matrices_and_their_exchanges_longer_than_adamw() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
        x = torch.empty(4096, 4096)
    cluster, devices = load_cluster("h100"), 4
    replicated, sharded = (
        sw.plan(net, (x,), devices=devices, mode="data_parallel", hsdp=hsdp).partitioned
        for hsdp in (None, {"level": "level3", "threshold": 0})
    )
    added = {}
    for name, partitioned in (("replicated", replicated), ("sharded", sharded)):
        adamw, muon = (predict(partitioned, cluster, optimizer=o) for o in ("adamw", "muon"))
        added[name] = muon.seconds - adamw.seconds
    # 5 iterations of three products of 2 * 4096^3 FLOPs, of four matrices or of one.
    rate = cluster.device.rate(torch.bfloat16, (4096, 4096, 4096))
    products = 5 * 3 * 2 * 4096**3 / rate
    assert added["replicated"] == pytest.approx(4 * products, rel=0.1)
    exchanged = 2 * 4096 * 4096 * 2 / cluster.levels[0].rate
    assert products < added["sharded"] < products + 1.5 * exchanged + 1e-3


def test_muon_over_one_of_equal_stages_takes_longer_in_that_stage_only() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        x = torch.empty(4096, 1024)
    partitioned = sw.plan(
        net, (x,), devices=4, mode="stand_alone", stages=4, micro_batches=4
    ).partitioned
    # By shape, parameters are counted in the order of the model.
    muon = torch.optim.Muon([net[1].weight])
    names = orthogonalized_parameters(muon, partitioned.graph)
    assert len(names) == 1
    updates = {
        tuple(value.name in names for value in chunk.graph.parameters): time.step.update
        for chunk, time in zip(
            partitioned.chunks,
            chunk_times(partitioned, load_cluster("h100"), optimizer=muon),
            strict=True,
        )
    }
    assert updates[True,] > updates[False,]

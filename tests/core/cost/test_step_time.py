"""Seconds of a step: the roofline and the overlap rules, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sample_models import llama, mlp
from shardwright.core.capture.capture import capture
from shardwright.core.cost.cluster import Cluster, Device, LinkLevel
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import chunk_times
from shardwright.core.cost.step_time import StepTime, bucket_seconds, step_time
from shardwright.core.cost.time_model import (
    MEMBER_OPERATORS,
    PARAMETER_OPERATORS,
    RECOMPUTE_OPERATORS,
    TimeModel,
)
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import communication, default_storage
from shardwright.core.partition.decisions import Decisions
from shardwright.core.rules.rule import RING, Cuts, Reduction
from shardwright.core.search.baselines import data_parallel
from tools.compare.test_published_rows import planned

DEVICE = Device(
    1, {"float32": 1e6, "bfloat16": 4e6}, memory_bandwidth=1e5, matrix_efficiency=0.5, overhead=0.01
)
CLUSTER = Cluster("toy", DEVICE, (LinkLevel("link", bandwidth=1e4, latency=0.001),))


def timed(
    graph: Graph, cuts: dict[str, Cuts], devices: int, cluster: Cluster = CLUSTER
) -> StepTime:
    mesh = prime_mesh(devices)
    flow = communication(graph, mesh, Decisions(cuts, default_storage(graph, mesh, cuts)))
    return step_time(graph, flow, cuts, TimeModel(cluster, mesh))


class Two(nn.Module):
    """x[32, 8] · w1[16, 8]ᵀ · w2[4, 16]ᵀ."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 16, bias=False)
        self.two = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)).square().mean()


@pytest.fixture
def graph() -> Graph:
    return capture(Two(), (torch.zeros(32, 8),))


def test_an_operator_takes_its_operations_or_its_bytes_whichever_is_longer(graph: Graph) -> None:
    model = TimeModel(CLUSTER, prime_mesh(2))
    flops, moved = 2 * 32 * 8 * 16, 4 * (32 * 8 + 16 * 8 + 32 * 16)
    assert flops / 5e5 < moved / 1e5
    forward, _ = model.operator_seconds(graph.by_name["one"], {})
    assert forward == pytest.approx(0.01 + moved / 1e5)
    fast = replace(CLUSTER, device=replace(DEVICE, memory_bandwidth=1e9))
    forward, _ = TimeModel(fast, prime_mesh(2)).operator_seconds(graph.by_name["one"], {})
    assert forward == pytest.approx(0.01 + flops / 5e5)


def test_a_cut_shares_operations_and_the_tensors_that_carry_it(graph: Graph) -> None:
    forward, _ = TimeModel(CLUSTER, prime_mesh(2)).operator_seconds(
        graph.by_name["one"], {"j": (0,)}
    )
    assert forward == pytest.approx(0.01 + 4 * (32 * 8 + 16 * 8 / 2 + 32 * 16 / 2) / 1e5)


def test_redistributions_of_activations_add_up(graph: Graph) -> None:
    cuts: dict[str, Cuts] = {"one": {"j": (0,)}, "two": {"k": (0,)}}
    time = timed(graph, cuts, 2)
    # The output of the second is summed up; nothing else is sent.
    all_reduce = 2 * 0.001 + 2 * (1 / 2) * 4 * 32 * 4 / 1e4
    assert time.forward_redistributions == pytest.approx(all_reduce)
    assert (time.backward_redistributions, time.gathers, time.gradients) == (0, 0, 0)
    assert time.seconds == pytest.approx(time.forward + time.backward + all_reduce + time.update)


def test_gradients_overlap_the_backward_computation(graph: Graph) -> None:
    time = timed(graph, data_parallel(graph, prime_mesh(2)), 2)
    # Both weights are joined in one bucket, which pays the latency once.
    assert time.gradients == pytest.approx(2 * 0.001 + 2 * (1 / 2) * 4 * (128 + 64) / 1e4)
    assert time.exposed == pytest.approx(max(0.0, time.gradients - time.backward))
    instant = replace(DEVICE, memory_bandwidth=1e12, rates={"float32": 1e12}, overhead=0.0)
    exposed = timed(graph, data_parallel(graph, prime_mesh(2)), 2, replace(CLUSTER, device=instant))
    assert exposed.exposed == pytest.approx(time.gradients, rel=1e-3)


def test_the_update_moves_each_stored_parameter_seven_times(graph: Graph) -> None:
    assert timed(graph, {}, 2).update == pytest.approx(7 * 4 * (128 + 64) / 1e5)
    stored = timed(graph, {"one": {"j": (0,)}, "two": {"k": (0,)}}, 2)
    assert stored.update == pytest.approx(7 * 4 * (128 + 64) / 2 / 1e5)


def test_micro_batches_repeat_all_but_gradients_and_update_and_a_bubble_stretches_them() -> None:
    once = StepTime(1.0, 2.0, 0.5, 0.25, gathers=0.0, gradients=3.0, update=0.125)
    assert once.seconds == 1 + 2 + 0.5 + 0.25 + (3 - 2) + 0.125
    piped = replace(once, micro_batches=4, bubble=0.2)
    assert piped.seconds == pytest.approx(4 * 3.75 / 0.8 + 1 + 0.125)
    assert (piped.computation, piped.communication) == (4 * 3 + 0.125, 4 * 0.75 + 1)


def test_what_every_micro_batch_gathers_and_reduces_hides_behind_its_own_computation() -> None:
    time = StepTime(
        1.0,
        2.0,
        0.0,
        0.0,
        0.5,
        0.5,
        0.0,
        gathers_per_micro_batch=1.5,
        gradients_per_micro_batch=1.75,
        micro_batches=2,
    )
    assert (time.forward_seconds, time.backward_seconds) == (1.5, 2.0)
    # Forward nothing is left to hide behind, backward 0.25.
    assert time.exposed == 0.5 + 0.25
    assert time.seconds == 2 * 3.5 + 0.75


def test_nothing_overlaps_where_devices_share_a_processor(graph: Graph) -> None:
    processes = replace(CLUSTER, device=replace(DEVICE, at_full_rate=1))
    time = timed(graph, data_parallel(graph, prime_mesh(2)), 2, processes)
    assert time.backward > time.gradients > 0
    assert time.exposed == time.gradients
    alone = StepTime(1.0, 2.0, 0.0, 0.0, 0.5, 0.5, 0.0, 1.5, 1.75, slowdown=1.0)
    assert alone.seconds == 1.0 + 2.0 + 0.5 + 0.5 + 1.5 + 1.75


def test_what_is_hidden_slows_the_computation_down() -> None:
    time = StepTime(
        *(1.0, 2.0, 0.5, 0.5, 0.5, 3.0, 0.0),
        forward_hidden=0.25,
        backward_hidden=0.5,
        slowdown=0.5,
    )
    assert (time.forward_seconds, time.backward_seconds) == (1.5 - 0.125, 2.5 - 0.25)
    # Beside the computation that is left: half a second of gathers, and 1.5 of 3 of reductions.
    assert time.exposed == 0.25 + (3 - 1.5) + 0.75


def test_a_cut_leaves_matrix_products_a_smaller_share_of_the_peak(graph: Graph) -> None:
    device = Device(1, {"float32": 1e6}, memory_bandwidth=1e9, matrix_half=8)
    model = TimeModel(replace(CLUSTER, device=device), prime_mesh(2))
    flops = 2 * 32 * 8 * 16
    for cut, (rows, columns, inner) in (("b", (16, 16, 8)), ("j", (32, 8, 8)), ("k", (32, 16, 4))):
        forward, _ = model.operator_seconds(graph.by_name["one"], {cut: (0,)})
        reached = rows / (rows + 8) * columns / (columns + 8) * inner / (inner + 8)
        assert forward == pytest.approx(flops / 2 / 1e6 / reached), cut


@pytest.mark.parametrize("model", [mlp, llama], ids=lambda m: m.__name__)
def test_on_instant_links_data_parallel_halves_the_time_of_shared_operators(model) -> None:
    net, args, kwargs = model()
    graph = capture(net, args, kwargs)
    instant = Cluster("instant", replace(DEVICE, overhead=0.0), (LinkLevel("link", 1e18, 0.0),))
    whole = timed(graph, {}, 2, instant)
    shared = timed(graph, data_parallel(graph, prime_mesh(2)), 2, instant)
    ends = (0.5 * (whole.forward + whole.backward), 0.8 * (whole.forward + whole.backward))
    assert ends[0] < shared.forward + shared.backward < ends[1]


def test_a_cpu_updates_parameters_one_by_one() -> None:
    device = replace(DEVICE, overhead=0.5)
    processes = replace(CLUSTER, device=replace(device, at_full_rate=8))
    accelerators = replace(CLUSTER, device=device)
    mesh = prime_mesh(2)
    one_by_one = TimeModel(processes, mesh).update_seconds(100.0, 3)
    assert (
        one_by_one
        == TimeModel(accelerators, mesh).update_seconds(100.0, 3) + 3 * PARAMETER_OPERATORS * 0.5
    )


def test_a_cpu_puts_each_parameter_into_its_bucket_and_takes_it_out(graph: Graph) -> None:
    cuts = data_parallel(graph, prime_mesh(2))
    apart, slow = replace(DEVICE, at_full_rate=8), replace(DEVICE, at_full_rate=8, overhead=1.0)
    before, after = (timed(graph, cuts, 2, replace(CLUSTER, device=d)) for d in (apart, slow))
    joined = 2 * MEMBER_OPERATORS * (1.0 - DEVICE.overhead)
    assert after.gradients == pytest.approx(before.gradients + joined)
    accelerator = replace(CLUSTER, device=replace(DEVICE, overhead=1.0))
    assert timed(graph, cuts, 2, accelerator).gradients == pytest.approx(
        timed(graph, cuts, 2).gradients
    )


def test_a_cpu_keeps_what_is_computed_again_in_python(graph: Graph) -> None:
    op = graph.by_name["one"]
    for at_full_rate, kept in ((None, 0.0), (8, RECOMPUTE_OPERATORS * DEVICE.overhead)):
        device = replace(DEVICE, at_full_rate=at_full_rate)
        model = TimeModel(replace(CLUSTER, device=device), prime_mesh(2))
        assert model.recompute_seconds(op, {}) == pytest.approx(
            model.operator_seconds(op, {})[0] + kept
        )


def test_norms_and_element_wise_operators_move_what_the_software_moves() -> None:
    net = nn.Sequential(nn.RMSNorm(1024), nn.GELU(), nn.Linear(1024, 8))
    graph = capture(net, (torch.randn(64, 1024),))
    device = replace(DEVICE, overhead=0.0)
    software = replace(device, norm_traffic=14.0, pointwise_traffic=0.5)
    plain, changed = (
        [
            sum(TimeModel(replace(CLUSTER, device=d), prime_mesh(2)).operator_seconds(op, {}))
            for op in graph.ops
        ]
        for d in (device, software)
    )
    ratios = {
        str(op.target): new / old for op, new, old in zip(graph.ops, changed, plain, strict=True)
    }
    assert ratios == {
        "aten.rms_norm.default": pytest.approx(14),
        "aten.gelu.default": pytest.approx(0.5),
        "aten.add.Tensor": pytest.approx(0.5),
        "aten.linear.default": pytest.approx(1),
    }


def test_gradients_that_are_reduced_in_float32_are_sent_in_twice_the_bytes(graph: Graph) -> None:
    double = replace(CLUSTER, device=replace(DEVICE, reduction_traffic=2.0))
    cuts = data_parallel(graph, prime_mesh(2))
    plain, in_float32 = (timed(graph, cuts, 2, cluster) for cluster in (CLUSTER, double))
    sent = 2 * (1 / 2) * 4 * (128 + 64) / 1e4
    assert in_float32.gradients == pytest.approx(plain.gradients + sent)
    for shard_size in (None, -1):
        before, after = (
            TimeModel(cluster, prime_mesh(2), optimizer_shard_size=shard_size).parameter_seconds(
                (0,), (), 1e6
            )
            for cluster in (CLUSTER, double)
        )
        assert after[0] == before[0] and after[1] > 1.9 * before[1]


def test_lists_of_parts_are_copied_part_by_part() -> None:
    plan = planned(data_parallel=8, sharded="parameters").candidate.partitioned
    in_lists = replace(CLUSTER, device=replace(DEVICE, part_overhead=1e-3))
    plain, copied = (
        list(bucket_seconds(plan.chunks[0].communication, TimeModel(cluster, plan.mesh)))
        for cluster in (CLUSTER, in_lists)
    )
    copies_of = {"all_gather": 8, "vary": 0}
    found = set()
    for (bucket, *_, before), (*_, after) in zip(plain, copied, strict=True):
        operations = {step.operation for step in bucket.steps}
        # Parameters that are not sharded have all-reduces, which write the tensor that they read.
        copies = max(copies_of[operation] for operation in operations)
        assert after - before == pytest.approx(copies * 1e-3 if before else 0)
        found |= operations
    assert found == set(copies_of)


def test_hooks_of_modules_gather_parameters_of_a_recomputed_block_twice() -> None:
    # Smaller parameters would stay whole.
    plan = planned(hidden=512, ffn=1024, recompute="full").candidate.partitioned
    twice = replace(CLUSTER, device=replace(DEVICE, gathers_to_recompute=True))
    found = set()
    for (bucket, *_, before), (*_, direction, after) in zip(
        *(
            list(bucket_seconds(plan.chunks[0].communication, TimeModel(cluster, plan.mesh)))
            for cluster in (CLUSTER, twice)
        ),
        strict=True,
    ):
        again = before > 0 and direction == 1 and bucket.segment is not None
        found.add((direction, after / before if before else 1))
        assert after == before or (again and after == 2 * before)
    assert found == {(0, 1), (1, 1), (1, 2)}


@pytest.mark.parametrize("traffic", [1.0, 0.5, 0.0])
def test_gradients_are_added_to_those_of_earlier_micro_batches(traffic: float) -> None:
    cluster = load_cluster("h100")
    cluster = replace(cluster, device=replace(cluster.device, accumulation_traffic=traffic))
    for sharded, shards in (("none", 1), ("optimizer", 1), ("gradients", 8)):
        run = planned(hidden=512, ffn=1024, sharded=sharded, global_batch=64)
        plan = run.candidate.partitioned
        assert plan.pipeline.micro_batches == 4
        (time,) = chunk_times(plan, cluster)
        numel = sum(value.numel for value in plan.graph.parameters)
        moved = traffic * 3 * (4 * numel / shards) / cluster.device.stream_bandwidth
        # The first micro-batch adds to nothing; norms too small to shard stay whole.
        assert time.step.accumulation == pytest.approx(3 / 4 * moved, rel=0.02)
        assert time.step.backward > time.step.accumulation


def test_parameters_that_wait_for_the_backward_pass_are_exposed() -> None:
    time = StepTime(1.0, 2.0, 0.0, 0.0, gathers=0.5, gradients=0.7, update=0.0)
    assert time.exposed == 0
    assert replace(time, overlaps_parameters=False).exposed == pytest.approx(1.2)


@pytest.mark.parametrize("slowdown", [0.0, 0.4, 1.0])
def test_a_part_computes_while_the_next_goes_round_a_ring(slowdown: float) -> None:
    device = replace(DEVICE, overlap_slowdown=slowdown)
    model = TimeModel(replace(CLUSTER, device=device), prime_mesh(4))
    ring = Reduction(("ring",), RING, (1, 1, 25, 10), torch.float32, varying=True)
    sent, launched = 3 * (0.001 + 1000 / 1e4), 3 * 20 * 0.01
    long, none = (100.0, 100.0), (0.0, 0.0)
    there, back = model.inner_collective_seconds(ring, (0, 1), True, long)
    assert there == pytest.approx(slowdown * sent + launched)
    assert back == pytest.approx(2 * slowdown * sent + launched)
    there, back = model.inner_collective_seconds(ring, (0, 1), True, none)
    assert (there, back) == pytest.approx((sent + launched, 2 * sent + launched))
    # Of the four parts the last is computed when nothing is on its way.
    there, _ = model.inner_collective_seconds(ring, (0, 1), True, (0.04, 0.0))
    assert there == pytest.approx(sent - (1 - slowdown) * 0.03 + launched)
    assert model.inner_collective_seconds(ring, (0, 1), False, long)[1] == 0

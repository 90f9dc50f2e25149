"""The parts of a predicted step: they add up to it, whatever it communicates and hides."""

from dataclasses import replace
from typing import Any

import pytest

import shardwright as sw
from sample_models import captured_micro_batch, llama
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.core.cost.product_overlap import product_overlaps
from shardwright.core.cost.time_parts import COMMUNICATION, TimePart, time_parts, utilization
from tools.compare.test_published_rows import planned

STAGES = {"stages": 2, "micro_batches": 4}


def plan_of_llama(**options: Any) -> sw.Plan:
    graph = captured_micro_batch(llama, options.get("micro_batches", 1), layers=2)
    return sw.plan(graph, devices=4, **options)


def parts_of(plan: sw.Plan, cluster: Cluster) -> tuple[TimePart, ...]:
    return time_parts(plan.partitioned, predict(plan.partitioned, cluster))


@pytest.mark.parametrize("shared", [False, True], ids=["accelerators", "one processor"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "data_parallel"},
        {"mode": "data_parallel", "hsdp": {"threshold": 0}},
        {"hsdp": {"level": "level3", "threshold": 0}, "micro_batches": 2},
        {"hsdp": {"level": "level2", "threshold": 0}, **STAGES},
        {**STAGES, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_the_parts_add_up_to_the_step(options: dict[str, Any], shared: bool) -> None:
    cluster = load_cluster("h100")
    if shared:
        cluster = replace(cluster, device=replace(cluster.device, at_full_rate=1))
    plan = plan_of_llama(**options)
    seconds = predict(plan.partitioned, cluster).seconds
    parts = parts_of(plan, cluster)
    assert sum(part.seconds for part in parts) == pytest.approx(seconds, rel=1e-9)
    assert all(part.seconds >= 0 and part.hidden >= 0 for part in parts)
    if shared:
        assert not any(part.hidden for part in parts)


@pytest.mark.parametrize(
    "options",
    [{"blocking": True}, {"blocking": False}, {"repeats_segments": True}],
    ids=str,
)
def test_the_parts_add_up_where_kernels_overlap_products_and_segments_run_to_their_end(
    options: dict[str, bool],
) -> None:
    sharding = {"data_parallel": 2, "tensor_parallel": 4, "sequence_parallel": True}
    run = planned(**sharding, sharded="none", recompute="full")
    partitioned = run.candidate.partitioned
    assert partitioned.decisions.recompute
    h100 = load_cluster("h100")
    cluster = replace(h100, device=replace(h100.device, overlaps_products=True))
    predicted = predict(partitioned, cluster, **options)
    (chunk,) = partitioned.chunks
    assert product_overlaps(chunk.graph, chunk.communication)
    parts = time_parts(partitioned, predicted)
    assert sum(part.seconds for part in parts) == pytest.approx(predicted.seconds, rel=1e-9)


def test_gradients_are_reduced_over_the_axis_that_cuts_the_batch_and_hidden_in_part() -> None:
    plan = plan_of_llama(mode="data_parallel")
    parts = parts_of(plan, load_cluster("h100"))
    (gradients,) = [part for part in parts if part.kind == "gradients"]
    assert gradients.axes == plan.mesh.alias_names
    assert gradients.hidden > 0
    assert not any(part.hidden for part in parts if part.kind not in COMMUNICATION)


def test_what_is_computed_again_is_a_part_of_its_own() -> None:
    net, args, kwargs = llama(layers=2)
    sw.recompute(net.model.layers[0])
    plan = sw.plan(net, args, kwargs, devices=4)
    parts = {part.kind: part.seconds for part in parts_of(plan, load_cluster("h100"))}
    assert 0 < parts["recomputation"] < parts["matrix products"] + parts["other operators"]


def test_utilization_is_the_least_time_of_the_matrix_products_over_that_of_the_step() -> None:
    plan = plan_of_llama(mode="data_parallel")
    cluster = load_cluster("h100")
    predicted = predict(plan.partitioned, cluster)
    slower = replace(predicted, seconds=2 * predicted.seconds)
    share = utilization(plan.partitioned, predicted)
    assert 0 < share < 1
    assert utilization(plan.partitioned, slower) == pytest.approx(share / 2)

"""Kernels that pipeline collectives with the matrix products beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.core.cost.product_overlap import product_overlaps
from tools.compare.test_published_rows import planned


def test_all_but_one_part_of_a_collective_goes_on_beside_its_products() -> None:
    run = planned(data_parallel=2, tensor_parallel=4, sequence_parallel=True, sharded="none")
    partitioned = run.candidate.partitioned
    (chunk,) = partitioned.chunks
    found = product_overlaps(chunk.graph, chunk.communication)
    beside = sorted(
        (transfer.step.operation, *(op.name.rpartition(".")[2] for op in overlap.overlapping_ops))
        for transfer, overlap in found.items()
        if "layers.1." in overlap.overlapping_ops[0].name
    )
    assert beside == [
        ("all_gather", "gate_proj", "up_proj"),
        ("all_gather", "q_proj", "k_proj", "v_proj"),
        ("reduce_scatter", "down_proj"),
        ("reduce_scatter", "o_proj"),
    ]
    assert {overlap.fraction for overlap in found.values()} == {3 / 4}
    h100 = load_cluster("h100")
    fast = replace(h100, device=replace(h100.device, overlaps_products=True, overlap_slowdown=0.0))
    plain = replace(fast, device=replace(fast.device, overlaps_products=False))
    (hidden,) = predict(partitioned, fast, blocking=True).chunks
    (blocked,) = predict(partitioned, plain, blocking=True).chunks
    assert blocked.forward_hidden == 0
    assert hidden.seconds == pytest.approx(
        blocked.seconds - hidden.micro_batches * (hidden.forward_hidden + hidden.backward_hidden)
    )

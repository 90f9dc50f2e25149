"""Published runs are planned as their experts ran them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.errors import ConfigError
from shardwright.tools.compare.published import PlannedRun
from shardwright.tools.compare.published_rows import PublishedRun
from tools.compare.test_published_rows import row


def planned(**changes: Any) -> PlannedRun:
    return PlannedRun(PublishedRun(**row(**changes)), load_cluster("h100"))


def test_what_cannot_be_divided_so_is_refused_with_the_row() -> None:
    with pytest.raises(
        ConfigError, match=r"row tiny cannot be planned: .*129 .*not divisible by model_p"
    ):
        planned(ffn=129, data_parallel=4, tensor_parallel=2).seconds()
    with pytest.raises(
        ConfigError, match=r"row tiny cannot be planned: .*2 layers cannot fill 4 stages"
    ):
        planned(data_parallel=2, stages=4, sharded="none").seconds()


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_run_is_planned_as_its_expert_divided_it(family: str) -> None:
    heads = 4 if family == "llama" else 8
    run = planned(
        family=family,
        kv_heads=heads,
        data_parallel=2,
        tensor_parallel=2,
        stages=2,
        sequence_parallel=True,
        sharded="none",
        recompute="full",
    )
    partitioned = run.candidate.partitioned
    assert (partitioned.mesh.num_devices, partitioned.pipeline.stages) == (4, 2)
    assert partitioned.pipeline.micro_batches == 8
    cuts = run.candidate.decisions.cuts
    assert {factor: len(axes) for factor, axes in cuts["model.layers.1.mlp.up_proj"].items()} == {
        "b": 1,
        "j": 1,
    }
    assert len(cuts["model.layers.0.input_layernorm"]) == 2
    assert any(chunk.communication.recomputed_ops for chunk in partitioned.chunks)
    whole_segments = partial(predict, partitioned, run.cluster, repeats_segments=True)
    assert run.seconds() == whole_segments(blocking=True).seconds
    assert run.seconds() > whole_segments().seconds


def test_selective_keeps_attention_and_every_second_product_of_a_block() -> None:
    candidate = planned(recompute="selective").candidate
    again = candidate.partitioned.chunks[0].communication.recomputed_ops
    kinds = Counter(
        (str(op.target), op.name in again)
        for op in candidate.model.graph.ops
        if op.module.startswith("model.layers.")
    )
    # Of seven products: q, v, gate and down are kept; k, o and up are not.
    assert kinds["aten.linear.default", False] == 2 * 4
    assert kinds["aten.linear.default", True] == 2 * 3
    assert kinds["aten.scaled_dot_product_attention.default", True] == 0
    assert kinds["aten.silu.default", False] == 0


def test_what_is_kept_of_blocks_is_counted_besides_what_they_need_as_a_whole() -> None:
    none, selective, full = (
        planned(recompute=each, seq=256).memory for each in ("none", "selective", "full")
    )
    # 2 sequences of 256 positions in bfloat16: q, attention and down of 64, v of 32, gate of 128.
    assert selective - full == 2 * (2 * 256) * 2 * (3 * 64 + 32 + 128)
    assert full < selective < none


def test_sharded_parameters_are_gathered_in_every_micro_batch() -> None:
    (whole,) = predict(planned(sharded="none").candidate.partitioned, load_cluster("h100")).chunks
    (shards,) = predict(planned().candidate.partitioned, load_cluster("h100")).chunks
    assert whole.gathers_per_micro_batch == 0 < shards.gathers_per_micro_batch
    assert planned().memory < planned(sharded="none").memory


def test_context_experts_and_chunks_are_divided_as_published() -> None:
    run = planned(
        family="mixtral",
        cp=2,
        ep=2,
        experts=4,
        experts_per_token=2,
        head_dim=16,
        layers=4,
        data_parallel=2,
        stages=2,
        chunks=2,
        sharded="none",
    )
    partitioned = run.candidate.partitioned
    assert [chunk.stage for chunk in partitioned.chunks] == [0, 1, 0, 1]
    cuts = run.candidate.decisions.cuts
    assert {len(cuts[f"model.layers.{i}.mlp.experts"]["e"]) for i in range(4)} == {1}
    assert cuts["model.layers.1.self_attn.q_proj"].keys() == {"b", "s"}
    assert run.seconds() > 0


def test_blocks_are_assigned_to_stages_as_published() -> None:
    run = planned(
        layers=3,
        data_parallel=4,
        stages=2,
        sharded="none",
        layers_of_stages=[1, 2],
    )
    modules = [
        {op.module.split(".")[2] for op in chunk.graph.ops if "layers" in op.module}
        for chunk in run.candidate.partitioned.chunks
    ]
    assert modules == [{"0"}, {"1", "2"}]


def test_sharded_parameters_are_gathered_block_by_block() -> None:
    (chunk,) = planned(layers=8, hidden=512, ffn=1024).candidate.partitioned.chunks
    gathers = [bucket for bucket in chunk.communication.buckets if bucket.gathers]
    # The blocks, and the embedding and the head.
    assert 8 <= len(gathers) <= 10
    zero_3 = planned(layers=8, hidden=512, ffn=1024, source="DeepSpeed ZeRO-3").candidate
    (chunk,) = zero_3.partitioned.chunks
    assert all(len(bucket.members) == 1 for bucket in chunk.communication.buckets)

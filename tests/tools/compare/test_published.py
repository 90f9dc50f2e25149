"""Published runs: what a row may say, and that it is planned as its expert ran it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.errors import ConfigError
from shardwright.tools.compare.published import PlannedRun, PublishedRun, read_published

ROW = {
    "id": "tiny",
    "source": "a laboratory's page",
    "model": "tiny",
    "family": "llama",
    "hidden": 64,
    "layers": 2,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 128,
    "vocab": 320,
    "seq": 32,
    "hardware": "h100",
    "devices": 8,
    "data_parallel": 8,
    "tensor_parallel": 1,
    "stages": 1,
    "sequence_parallel": False,
    "sharded": "parameters",
    "micro_batch": 2,
    "global_batch": 32,
    "recompute": "none",
    "dtype": "bf16",
    "tokens_per_second_per_device": 1000,
    "memory_gib": None,
}


def row(**changes: Any) -> dict[str, Any]:
    return {**ROW, **changes}


def planned(**changes: Any) -> PlannedRun:
    return PlannedRun(PublishedRun(**row(**changes)), load_cluster("h100"))


def read(rows: Any, folder: Path) -> list[PublishedRun]:
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    return read_published(file)


def test_rows_are_read_with_the_seconds_of_a_step(tmp_path: Path) -> None:
    (run,) = read({"notes": ["…"], "rows": [row(comment="ignored")]}, tmp_path)
    assert (run.micro_batches, run.seconds) == (2, 32 * 32 / 8 / 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"devices": 16},
            r"`devices` is 16, but must be data_parallel · tensor_parallel · stages = 8 · 1",
        ),
        ({"global_batch": 24}, "`global_batch` is 24, which is not a multiple of .* = 16"),
        (
            {"devices": 3, "data_parallel": 1, "tensor_parallel": 3},
            "`heads` is 8, which is not a multiple of tensor_parallel = 3",
        ),
        ({"hidden": None}, "hidden: .* not None"),
        ({"hidden": 64.5}, "hidden: .* not 64.5"),
        ({"hidden": 60}, "hidden_size=60 is not divisible by num_heads=8"),
        ({"layers": 0}, "layers: .* greater than 0, not 0"),
        ({"tokens_per_second_per_device": -1.0}, "tokens_per_second_per_device: .* not -1.0"),
        ({"tokens_per_second_per_device": "fast"}, "tokens_per_second_per_device: .*'fast'"),
        ({"memory_gib": 0.0}, "memory_gib: .* greater than 0"),
        ({"recompute": "some"}, "recompute: .*'none', 'selective' or 'full', not 'some'"),
        ({"sharded": True}, "sharded: "),
        ({"family": "mamba"}, "family: .*'mamba'"),
    ],
)
def test_an_impossible_row_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"rows.json: rows\[1\] \(bad\): {message}"):
        read({"rows": [row(), row(id="bad", **changes)]}, tmp_path)


def test_a_figure_that_is_missing_is_named(tmp_path: Path) -> None:
    rows = [{key: value for key, value in ROW.items() if key != "micro_batch"}]
    with pytest.raises(ConfigError, match=r"rows\[0\] \(tiny\): the key `micro_batch` is missing"):
        read({"rows": rows}, tmp_path)
    with pytest.raises(ConfigError, match="the file has no rows"):
        read({"rows": []}, tmp_path)
    with pytest.raises(ConfigError, match=r"rows\[1\]: another row has the id 'tiny'"):
        read([ROW, ROW], tmp_path)


def test_more_than_the_peak_is_impossible() -> None:
    run = PublishedRun(**row())
    share = run.utilization(load_cluster("h100"), run.seconds)
    # Attention, gate, up and down of each layer, the head, and all scores.
    weights = 2 * (3 * 64 * 64 + 3 * 64 * 128) + 320 * 64
    assert share == pytest.approx(1000 * (6 * weights + 12 * 2 * 64 * 32) / 989e12)
    with pytest.raises(ConfigError, match=r"row tiny: .* are 2\d\d% of the peak of h100"):
        planned(tokens_per_second_per_device=2.0e3 / share)


def test_unknown_hardware_is_refused_with_the_row() -> None:
    with pytest.raises(
        ConfigError,
        match=r"row tiny: cannot load the cluster `hardware`: cluster 'h300': .*\n.* a100",
    ):
        _ = PublishedRun(**row(hardware="h300")).cluster


def test_what_cannot_be_divided_so_is_refused_with_the_row() -> None:
    with pytest.raises(
        ConfigError, match=r"row tiny cannot be planned: .*321 entries are not divisible by model_p"
    ):
        planned(vocab=321, data_parallel=4, tensor_parallel=2).seconds()
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
    assert run.seconds() == predict(partitioned, run.cluster, blocking=True).seconds
    assert run.seconds() > predict(partitioned, run.cluster).seconds


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

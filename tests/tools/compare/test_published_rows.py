"""What a row of a published run may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ConfigError
from shardwright.tools.compare.published import PlannedRun
from shardwright.tools.compare.published_rows import PublishedRun, read_published

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
        (
            {"context_parallel": 2},
            r"`devices` is 8, but must be .* · stages · context_parallel = 8 · 1 · 1 · 2",
        ),
        (
            {"expert_parallel": 3},
            "`expert_parallel` is 3, which does not divide the 8 devices of a",
        ),
        (
            {"expert_tensor_parallel": 3},
            "`expert_tensor_parallel` is 3, but must be 1 or tensor_parallel = 1",
        ),
        ({"shard_size": 3}, "`shard_size` is 3, which does not divide data_parallel = 8"),
        ({"experts_per_token": 2}, "experts_per_token=2 is more than num_experts=1"),
        ({"schedule": "dualpipe"}, "schedule: .*'dualpipe'"),
        (
            {"data_parallel": 4, "stages": 2, "chunks": 2, "schedule": "1f1b"},
            "`chunks` is 2, but schedule 1f1b runs 1",
        ),
        (
            {"data_parallel": 4, "stages": 2, "layers_of_stages": [2, 1]},
            r"`layers_of_stages` \[2, 1\] does not divide 2 layers into 2 stages",
        ),
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


def test_rows_say_how_context_experts_and_stages_are_divided() -> None:
    run = PublishedRun(
        **row(
            family="mixtral",
            cp=2,
            ep=2,
            experts=4,
            experts_per_token=2,
            head_dim=16,
            data_parallel=2,
            stages=2,
            layers=4,
            chunks=2,
            kernel="fa2",
        )
    )
    assert (run.context_parallel, run.expert_parallel) == (2, 2)
    assert (run.sizes.num_experts, run.sizes.head_size) == (4, 16)
    assert run.schedule_name == "interleaved_1f1b"
    assert not run.has_explicit_attention
    assert PublishedRun(**row(attention="explicit")).has_explicit_attention
    assert PublishedRun(**row(context_parallel=1)).schedule_name == "1f1b"


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"ep": 2}, False),
        ({"ep": 2, "etp": 1}, True),
        ({"ep": 2, "etp": 2}, False),
        # More experts than replicas need the devices of tensor parallelism.
        ({"ep": 8}, True),
    ],
)
def test_devices_have_whole_experts_if_the_row_says_so_or_replicas_are_too_few(
    changes: dict[str, Any], whole: bool
) -> None:
    run = PublishedRun(**row(data_parallel=4, tensor_parallel=2, **changes))
    assert run.has_whole_experts == whole


def test_rows_may_use_the_names_of_other_frameworks(tmp_path: Path) -> None:
    named = row(stages=2, data_parallel=2, tensor_parallel=2, schedule="interleaved_1f1b", chunks=1)
    for key in ("stages", "data_parallel", "tensor_parallel", "hidden", "global_batch", "chunks"):
        del named[key]
    named |= {"pp": 2, "dp": 2, "tp": 2, "hidden_size": 64, "gbs": 32, "vpp": 1}
    named |= {"hardware": "NVIDIA H100-SXM5-80GB (DGX)", "dtype": "bfloat16", "sharded": "ZeRO-3"}
    named |= {"schedule": "1F1B", "recompute": True}
    degrees = {"stages": 2, "data_parallel": 2, "tensor_parallel": 2}
    assert read([named], tmp_path) == [
        PublishedRun(**row(**degrees, schedule="1f1b", recompute="full"))
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp": 4}, "`data_parallel` has two values, 8 and 4"),
        ({"dtype": "mxfp8"}, "dtype mxfp8: clusters have no rates of such products"),
        ({"lora": {"rank": 8}}, "`lora`: runs that train only adapters are not predicted"),
        ({"sharded": True}, "sharded: .* not True"),
        ({"sharded": ["fsdp"]}, "sharded: .*"),
    ],
)
def test_rows_of_other_kinds_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read([row(**changes)], tmp_path)


def test_vocabularies_are_padded_for_tensor_parallelism() -> None:
    run = PublishedRun(**row(vocab=317, tensor_parallel=8, data_parallel=1))
    assert run.sizes.vocab_size == 320


def test_state_may_be_sharded_over_some_of_the_replicas() -> None:
    keys = {key: value for key, value in ROW.items() if key != "data_parallel"}
    hybrid = PlannedRun(
        PublishedRun(**{**keys, "dp_shard": 2, "dp_replicate": 4}), load_cluster("h100")
    )
    sharding = hybrid.candidate.decisions.sharding
    assert sharding is not None
    assert (hybrid.run.data_parallel, sharding.shard_size) == (8, 2)
    assert hybrid.memory > planned().memory
    assert PublishedRun(**row(dp_replicate=4)) == PublishedRun(**row(shard_size=2))
    with pytest.raises(ValueError, match="`dp_replicate` is 3, which does not divide 8 replicas"):
        PublishedRun(**row(dp_replicate=3))
    all_replicas = PublishedRun(**row(dp_shard=-1))
    assert all_replicas == PublishedRun(**row())

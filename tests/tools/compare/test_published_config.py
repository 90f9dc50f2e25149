"""Published runs that configurations of MindFormers describe."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ConfigError
from shardwright.tools.compare.fit_cluster import fit_cluster
from shardwright.tools.compare.published_config import planned_runs, read_configured
from tools.compare.test_published_rows import ROW

RUN = {
    "file": "tiny.yaml",
    "source": "somewhere",
    "hardware": "ascend910b (Atlas 900)",
    "devices": 8,
    "tokens_per_second_per_device": 1000,
}
CONFIGURATION: dict[str, Any] = {
    "runner_config": {"batch_size": 2},
    "optimizer": {"type": "FP32StateAdamWeightDecay", "learning_rate": 1e-5},
    "use_parallel": True,
    "parallel": {"parallel_mode": 1, "full_batch": True, "enable_parallel_optimizer": True},
    "parallel_config": {"data_parallel": 4, "model_parallel": 2, "pipeline_stage": 1},
    "recompute_config": {"recompute": True},
    "model": {
        "arch": {"type": "LlamaForCausalLM"},
        "model_config": {
            "type": "LlamaConfig",
            "seq_length": 128,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 320,
            "intermediate_size": 128,
            "compute_dtype": "bfloat16",
        },
    },
}


def write(folder: Path, *runs: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> Path:
    file = folder / "rows.json"
    content = {"mindformers": list(runs)} | ({} if rows is None else {"rows": rows})
    file.write_text(json.dumps(content))
    return file


def configure(path: Path, **changes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**CONFIGURATION, **changes}))


@pytest.mark.parametrize(
    "place", ["tiny.yaml", "mindformers/a/tiny.yaml", "mindformers/b__tiny.yaml"]
)
def test_a_run_is_planned_as_its_configuration_says(place: str, tmp_path: Path) -> None:
    configure(tmp_path / place)
    [planned], left_out = planned_runs(write(tmp_path, RUN))
    assert not left_out
    assert planned.cluster == load_cluster("ascend910b")
    assert planned.run.seconds == pytest.approx(8 * 128 / 8 / 1000)
    share = planned.run.utilization(planned.cluster, planned.run.seconds)
    assert 0 < share < 1
    assert planned.run.utilization(planned.cluster, 0.5) < share
    assert planned.seconds() > 0
    assert planned.memory > 0
    plan = planned.plan  # type: ignore[attr-defined]
    assert plan.strategies["model.layers.0.mlp.up_proj"] == ((4, 1, 1), (2, 1))
    assert plan.decisions.recompute
    assert plan.decisions.sharding is not None


def test_both_kinds_of_runs_stand_in_one_file(tmp_path: Path) -> None:
    configure(tmp_path / "tiny.yaml")
    file = write(tmp_path, RUN, rows=[ROW])
    planned, _ = planned_runs(file)
    assert [each.run.id for each in planned] == ["tiny", "tiny"]
    [of_ascend], _ = planned_runs(file, load_cluster("ascend910b"))
    assert of_ascend.run.hardware == "ascend910b"
    with pytest.raises(ConfigError, match="no run is on the cluster a100\\nuse one of asc"):
        planned_runs(file, load_cluster("a100"))


def test_runs_whose_configuration_cannot_be_read_are_left_out_with_why(tmp_path: Path) -> None:
    configure(tmp_path / "tiny.yaml")
    configure(tmp_path / "odd.yaml", parallel_config={"data_parallel": 3})
    (tmp_path / "own.yaml").write_text(
        "model: {name: llama2_7b}\ndata: {name: text, seq_length: 8}\n"
    )
    others = [{**RUN, "file": name} for name in ("odd.yaml", "own.yaml", "gone.yaml")]
    runs, left_out = read_configured(write(tmp_path, RUN, *others))
    assert [run.id for run in runs] == ["tiny"]
    assert "odd.yaml" in left_out["odd.yaml"] and "data_parallel" in left_out["odd.yaml"]
    assert "not a MindFormers configuration" in left_out["own.yaml"]
    assert left_out["gone.yaml"].startswith("gone.yaml: no such file in ")
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such file"):
        planned_runs(write(tmp_path, others[2]))


def test_impossible_figures_are_refused_by_name(tmp_path: Path) -> None:
    configure(tmp_path / "tiny.yaml")
    with pytest.raises(ConfigError, match=r"mindformers\[0\]: devices"):
        planned_runs(write(tmp_path, {**RUN, "devices": 0}))
    with pytest.raises(ConfigError, match=r"row tiny: .* of the peak of ascend910b"):
        planned_runs(write(tmp_path, {**RUN, "tokens_per_second_per_device": 1e12}))
    with pytest.raises(ConfigError, match="row tiny: cannot load the cluster"):
        planned_runs(write(tmp_path, {**RUN, "hardware": "abacus"}))


def test_a_cluster_is_fitted_to_them(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    configure(tmp_path / "tiny.yaml")
    [planned], _ = planned_runs(write(tmp_path, RUN))
    tokens = 1000 * planned.run.seconds / planned.seconds() / 1.2
    planned, _ = planned_runs(write(tmp_path, {**RUN, "tokens_per_second_per_device": tokens}))
    before = planned[0].seconds() / planned[0].run.seconds
    fit = fit_cluster(planned, planned[0].cluster)
    assert before < 0.9 < fit.ratios["tiny"]

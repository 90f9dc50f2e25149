"""The benchmark of one accelerator, on the CPU with sizes at which it measures nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from benchmarks.one_gpu.collectives import group_of_one, own_collectives
from benchmarks.one_gpu.memory import PLANS, ranks_of
from benchmarks.one_gpu.rates import attention_figures, matrix_figures, measured_cluster
from benchmarks.one_gpu.sizes import FULL, TINY

from shardwright.core.cost.cluster_file import cluster_to_yaml, read_cluster
from shardwright.core.cost.clusters import load_cluster

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script, as somebody runs it from a checkout that is not installed."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_rates_of_a_device_become_a_cluster_file_that_is_read() -> None:
    cluster, tables = measured_cluster(CPU, TINY, "tried", "h100")
    assert read_cluster(cluster_to_yaml(cluster), "tried.yaml") == cluster
    assert cluster.levels == load_cluster("h100").levels
    assert 0 < cluster.device.matrix_efficiency <= 1
    assert cluster.device.attention_efficiency is not None
    assert 0 < cluster.device.attention_efficiency <= 1
    products = next(table for table in tables if "products" in table.title)
    assert len(products.rows) == len(TINY.matrices)


def test_what_large_products_reach_is_found_from_products_of_many_shapes() -> None:
    shapes = [(4096, 4096, 4096), (256, 4096, 4096), (8192, 128, 1024), (512, 512, 512)]
    shares = [0.7 * prod(d / (d + 256) for d in shape) for shape in shapes]
    assert matrix_figures(shapes, shares) == (pytest.approx(0.7), 256)


def test_what_attention_reaches_is_found_from_few_and_many_keys() -> None:
    keys = (256, 1024, 4096, 8192)
    found = attention_figures(keys, [0.6 * t / (t + 370) for t in keys])
    assert found == (pytest.approx(0.6), pytest.approx(370))
    assert attention_figures((64,), (0.5,)) == (0.5, 0.0)


@pytest.mark.parametrize("name", ["level3, recompute", "2 stages, 1f1b"])
def test_the_rank_of_a_plan_needs_the_memory_that_is_predicted(name: str) -> None:
    ranks = ranks_of(name, CPU, TINY)
    assert [rank.stage for rank in ranks] == list(range(len(ranks)))
    for rank in ranks:
        assert rank.as_planned and rank.allocated_peak is None
        assert rank.planned_peak == pytest.approx(rank.peak_bytes, rel=0.02)


def test_twelve_plans_are_measured() -> None:
    assert len(set(PLANS)) == 12
    assert len(FULL.sequences) > 2 and torch.bfloat16 in FULL.dtypes


def test_all_collectives_of_one_rank_are_exact() -> None:
    table = own_collectives(CPU, TINY)
    assert not table.missed
    assert [row[-1] for row in table.rows] == ["exact"] * 12 + ["runs"] * 4


def test_a_group_of_one_rank_leaves_no_process_group_behind() -> None:
    with group_of_one(CPU) as world:
        assert world.size() == 1
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_without_an_accelerator_it_says_how_to_try_it(tmp_path: Path) -> None:
    done = run(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no accelerator here; --tiny --device cpu tries all of it" in done.stdout


@pytest.mark.slow
def test_a_missing_dependency_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(
        "raise ModuleNotFoundError('no pydantic', name='pydantic')"
    )
    done = run(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: no pydantic: benchmarks/gpu.py needs torch, numpy,")
    assert "pip download pydantic" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_all_of_it_runs_and_is_written(tmp_path: Path) -> None:
    done = run(tmp_path, "--tiny", "--device", "cpu", "--out", "results")
    # Numbers of such sizes miss goals.
    assert done.returncode in (0, 1), done.stderr[-3000:]
    page = (tmp_path / "results" / "gpu.md").read_text(encoding="utf-8")
    assert page.count("\n## ") == 5
    assert page.count("| exact |") == 12 and page.count("| runs |") == 4 and "wrong" not in page
    assert all(f"| {name} | 0 |" in page for name in PLANS)
    assert "program, compiled" in page
    (file,) = (tmp_path / "results").glob("*.yaml")
    assert load_cluster(file).device.rates["bfloat16"] > 0

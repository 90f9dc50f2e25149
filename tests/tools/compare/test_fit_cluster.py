"""Fitting the figures of a cluster to runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ConfigError
from shardwright.tools.compare.fit_cluster import Fit, figures_of, fit_cluster
from shardwright.tools.compare.published import PlannedRun
from shardwright.tools.compare.published_rows import PublishedRun

BASE = load_cluster("h100")
TRUTH = replace(
    BASE,
    device=replace(BASE.device, matrix_efficiency=0.55, matrix_half=400, memory_efficiency=0.85),
)
SHAPES = ((1024, 512, 1), (1024, 2048, 8), (2048, 1024, 2), (4096, 512, 2), (4096, 4096, 4))


@pytest.fixture(scope="module")
def planned() -> list[PlannedRun]:
    """Runs of one layer on 8 devices, which took as long as the truth predicts."""
    runs = []
    for hidden, seq, micro_batch in SHAPES:
        run = PublishedRun(
            id=f"{hidden}-{seq}",
            source="a laboratory",
            model="one layer",
            family="gpt",
            hidden=hidden,
            layers=1,
            heads=8,
            kv_heads=8,
            ffn=4 * hidden,
            vocab=1024,
            seq=seq,
            hardware="h100",
            devices=8,
            data_parallel=8,
            tensor_parallel=1,
            stages=1,
            sequence_parallel=False,
            sharded="parameters",
            micro_batch=micro_batch,
            global_batch=8 * micro_batch,
            recompute="none",
            dtype="bf16",
            tokens_per_second_per_device=1.0,
        )
        runs.append(slower(PlannedRun(run, BASE), TRUTH, 1.0))
    return runs


def slower(planned: PlannedRun, cluster: Cluster, times: float) -> PlannedRun:
    """The run as if it had taken so many times longer than on `cluster`."""
    run, seconds = planned.run, times * planned.seconds(cluster)
    tokens = run.global_batch * run.seq / run.devices / seconds
    changed = run.model_copy(update={"tokens_per_second_per_device": tokens})
    return replace(planned, run=changed)


def errors(fit: Fit, runs: Sequence[str]) -> list[float]:
    return [abs(fit.ratios[run] - 1) for run in runs]


def test_what_a_cluster_reaches_is_found_from_its_runs(planned: list[PlannedRun]) -> None:
    before = [abs(each.seconds(BASE) / each.run.seconds - 1) for each in planned]
    fit = fit_cluster(planned, BASE)
    assert max(before) > 0.1
    assert max(errors(fit, list(fit.ratios))) < 0.02
    assert not fit.unexplained
    assert fit.cluster.device.rates == BASE.device.rates
    assert [level.bandwidth for level in fit.cluster.levels] == [450e9, 50e9]
    for figure in figures_of(fit.cluster):
        assert figure.minimum <= figure.value_in(fit.cluster) <= figure.maximum
    # No run uses the links between nodes: what is known of them stays.
    assert fit.cluster.levels[1].latency == pytest.approx(BASE.levels[1].latency)
    assert fit.cluster.levels[1].efficiency == BASE.levels[1].efficiency


def test_a_run_that_contradicts_the_others_is_named_and_changes_them_little(
    planned: list[PlannedRun],
) -> None:
    odd = slower(planned[2], TRUTH, 2.0)
    fit = fit_cluster([*planned[:2], odd, *planned[3:]], BASE)
    assert list(fit.unexplained) == [odd.run.id]
    others = [each.run.id for each in planned if each.run.id != odd.run.id]
    assert max(errors(fit, others)) < 0.1


def test_runs_that_no_figures_explain_are_one_error(planned: list[PlannedRun]) -> None:
    impossible = [slower(each, TRUTH, 1000.0) for each in planned]
    with pytest.raises(ConfigError, match=r"fitting the cluster h100 failed: .* 99% in the median"):
        fit_cluster(impossible, BASE)


def test_without_scipy_there_is_one_error(
    planned: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"needs `scipy` .*\n.*'shardwright\[tools\]'"):
        fit_cluster(planned[:1], BASE)

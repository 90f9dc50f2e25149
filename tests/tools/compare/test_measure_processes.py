"""What so many processes take on this machine: figures that predict the measured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.cost.cluster import GLOO, LOCAL, Cluster, Device, LinkLevel
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.local_cluster import ASSUMED_LINK
from shardwright.core.cost.predict import predict
from shardwright.core.partition.partitioned import Partitioned
from shardwright.tools.compare.measure_processes import (
    FIGURES,
    MeasuredStep,
    calibrate,
    fit_overheads,
    measure_cluster,
    measured_step,
    with_figures,
)

MACHINE = Cluster(
    LOCAL,
    Device(1 << 30, {"float32": 1e11}, 1e10, overhead=1e-5, at_full_rate=1),
    (LinkLevel("processes", 1e9, 0.0, collectives=GLOO),),
)
TRUE = {
    "overhead": 2e-5,
    "pass_overhead": 1e-3,
    "step_overhead": 4e-3,
    "call": 5e-4,
    "latency": 1e-4,
}


class Blocks(nn.Module):
    """Layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


@pytest.fixture(scope="module")
def programs() -> list[Partitioned]:
    """Of different numbers of operators, passes and calls, in groups of different sizes."""
    options = [
        *(
            {"devices": n, "mode": "data_parallel", "micro_batches": m}
            for n in (2, 4)
            for m in (1, 2)
        ),
        *({"devices": n, "stages": 2, "micro_batches": m} for n in (2, 4) for m in (2, 4)),
        {"devices": 1},
        {"devices": 4, "mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}},
    ]
    return [sw.plan(Blocks(), (torch.ones(16, 8),), **each).partitioned for each in options]  # type: ignore[arg-type]


def test_a_step_is_the_sum_of_its_figures_and_of_the_others(programs: list[Partitioned]) -> None:
    true = with_figures(MACHINE, TRUE)
    for each in programs:
        step = measured_step(each, MACHINE, seconds=1.0)
        figures = sum(n * TRUE[name] for n, name in zip(step.counts, FIGURES, strict=True))
        assert step.other_seconds + figures == pytest.approx(predict(each, true).seconds)


def test_the_figures_that_made_the_steps_are_found(programs: list[Partitioned]) -> None:
    true = with_figures(MACHINE, TRUE)
    steps = [measured_step(each, MACHINE, predict(each, true).seconds) for each in programs]
    found = fit_overheads(MACHINE, steps)
    for each in programs:
        assert predict(each, found).seconds == pytest.approx(predict(each, true).seconds, rel=0.02)
    assert found.device.overhead == pytest.approx(2e-5, rel=0.1)
    assert found.levels[0].call == pytest.approx(5e-4, rel=0.1)
    assert found.levels[0].latency == pytest.approx(1e-4, rel=0.1)


def test_no_figure_is_negative(programs: list[Partitioned]) -> None:
    steps = [measured_step(each, MACHINE, 1e-6) for each in programs]
    found = fit_overheads(MACHINE, steps)
    device, link = found.device, found.levels[0]
    assert min(device.overhead, device.pass_overhead, device.step_overhead) >= 0
    assert min(link.call, link.latency) >= 0


def test_what_the_steps_do_not_tell_apart_is_shared_out_as_assumed() -> None:
    # Of two processes a call has one message, whatever is sent.
    steps = [MeasuredStep((0.0, 0.0, 0.0, n, n), 0.0, n * 1e-3) for n in (10.0, 20.0)]
    link = fit_overheads(MACHINE, steps).levels[0]
    assert link.call + link.latency == pytest.approx(1e-3, rel=0.02)
    assert link.call > link.latency > ASSUMED_LINK.latency


@pytest.mark.distributed
def test_calibration_measures_processes_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reports = list[str]()
    cluster = calibrate(2, lambda doing, done=0, of=0: reports.append(doing))
    link = cluster.levels[0]
    assert link.collectives == GLOO
    assert 1e-6 < link.call + link.latency < 1
    assert 1e6 < link.bandwidth < 1e12
    assert 1e-8 < cluster.device.overhead < 1e-3
    assert min(cluster.device.rates.values()) > 1e8
    assert load_cluster("local") == cluster
    assert "steps of a small model" in reports


def test_one_process_alone_measures_no_links() -> None:
    with pytest.raises(ValueError, match="at least 2 processes, got 1"):
        measure_cluster(1)

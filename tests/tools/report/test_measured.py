"""What was measured stands on the page beside what is predicted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.cost.collective_totals import CollectiveTotal, collective_totals
from shardwright.core.plan.measured import PROFILE_FILE, Measured, MeasuredRank
from shardwright.errors import PlanError
from shardwright.tools.report import page_html
from shardwright.tools.report.plan_page import plan_page


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    net = sw.WithLoss(nn.Sequential(nn.Linear(512, 512), nn.ReLU()), nn.MSELoss())
    batch = (torch.randn(64, 512), torch.randn(64, 512))
    return sw.plan(net, batch, devices=2, cluster="h100", mode="data_parallel")


@pytest.fixture(scope="module")
def measured(plan: sw.Plan) -> Measured:
    kinds = {"matrix products": 2e-3, "communication": 5e-4, "optimizer": 1e-3}
    predicted = collective_totals(plan.partitioned, 0, None)
    sent = tuple(replace(total, seconds=5e-4) for total in predicted)
    ranks = tuple(MeasuredRank(n, 0, 4e-3, kinds, sent, 1 << 22) for n in range(2))
    return Measured(plan.fingerprint, "cpu", 3, ranks, (predicted,))


def test_each_kind_and_each_collective_has_both_numbers(plan: sw.Plan, measured: Measured) -> None:
    kinds, collectives, ranks = plan_page(plan, measured=measured).measured
    rows = {name: cells for name, *cells in kinds.table}
    assert plan.step is not None
    assert rows["step"][1:] == ["4 ms", f"{4e-3 / plan.step.seconds:.2f}"]
    assert rows["matrix products"][1] == "2 ms" and rows["matrix products"][0]
    assert rows["between operators"] == ["", "500 μs", ""]
    assert [row.label for row in kinds.rows] == ["predicted", "measured"]
    (row,) = [row for row in collectives.table if row[0].startswith("all_reduce over dp")]
    assert int(row[1]) == int(row[2]) > 0
    assert row[3] == row[4] != "" and row[5:] == ("", "500 μs")
    assert [row[0] for row in ranks.table] == ["rank 0", "rank 1"]
    assert ranks.table[0][2] == "4.0 MiB" and ranks.table[0][1]
    html = page_html(plan_page(plan, measured=measured))
    assert html.index('id="time"') < html.index('id="measured"') < html.index('id="memory"')
    assert 'id="measured"' not in page_html(plan_page(plan))


def test_without_a_prediction_the_page_has_what_was_measured(measured: Measured) -> None:
    net = sw.WithLoss(nn.Linear(8, 8), nn.MSELoss())
    plan = sw.plan(net, (torch.randn(4, 8), torch.randn(4, 8)), devices=2)
    own = replace(measured, fingerprint=plan.fingerprint)
    kinds, *_ = plan_page(plan, measured=own).measured
    assert [row.label for row in kinds.rows] == ["measured"]
    assert kinds.table[0] == ("step", "", "4 ms", "") and "for a cluster" in kinds.note


def test_a_profile_is_read_as_it_was_written(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    measured.save(tmp_path / "1" / PROFILE_FILE)
    assert Measured.load(tmp_path) == Measured.load(tmp_path / "1") == measured


@pytest.mark.parametrize("text", ["", '{"profile_format": 0}', '{"profile_format": 2}', "[1]"])
def test_a_file_that_is_no_profile_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / PROFILE_FILE).write_text(text)
    with pytest.raises(PlanError, match=rf"{PROFILE_FILE} is not a"):
        Measured.load(tmp_path)


def test_a_profile_of_another_plan_or_none_is_refused(plan: sw.Plan, measured: Measured) -> None:
    with pytest.raises(PlanError, match="have different models or numbers of ranks"):
        plan_page(plan, measured=replace(measured, fingerprint="other"))
    with pytest.raises(
        PlanError, match=r"has no file `profile\.json`\nprofile a run with `shardwright train"
    ):
        Measured.load(Path(__file__).parent)


def test_a_collective_that_was_not_planned_is_shown(plan: sw.Plan, measured: Measured) -> None:
    more = CollectiveTotal("all_to_all", "tp", 3, 1024, 1e-6)
    ranks = tuple(replace(rank, collectives=(more,)) for rank in measured.ranks)
    chart = plan_page(plan, measured=replace(measured, ranks=ranks)).measured[1]
    assert ("all_to_all over tp", "", "3", "", "1.0 KiB", "", "1 μs") in chart.table

"""Plans that really run beside what was predicted: how they are chosen, and what is made of it."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest
import scipy.stats

from shardwright.cli.compare import measured_table
from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ConfigError
from shardwright.run.launch.log_folder import LogFolder
from shardwright.tools.compare import AUTO, DATA_PARALLEL, EXPERT, compare_measured
from shardwright.tools.compare.measured import MeasuredComparison, MeasuredPlan, spearman
from shardwright.tools.compare.predicted import GridComparison, expert_run
from shardwright.tools.compare.worker import plan_order, tiny_run
from tools.compare.test_predicted import written

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 2, 3, 4], [10, 30, 20, 40]),
        ([1, 2, 2, 3, 5], [5, 4, 4, 4, 1]),
        ([0.3, 0.1, 0.2], [1, 2, 2]),
    ],
)
def test_spearman_counts_ranks_and_shares_those_of_equal_values(
    x: list[float], y: list[float]
) -> None:
    assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)


def test_spearman_of_values_that_are_all_equal_is_not_a_number() -> None:
    assert isnan(spearman([1, 1, 1], [1, 2, 3]))


@pytest.mark.parametrize(
    ("model", "devices", "parts"),
    [
        ("llama2_70b", 8, (1, 4, 2)),
        ("pangualpha_13b", 8, (2, 4, 1)),
        ("qwen_14b", 8, (1, 8, 1)),
        ("llama2_7b", 2, (2, 1, 1)),
    ],
)
def test_a_tiny_model_is_divided_as_its_expert_divides_the_large_one(
    model: str, devices: int, parts: tuple[int, int, int]
) -> None:
    run = tiny_run(expert_run(CONFIGS / f"{model}_expert.yaml"), devices)
    comparison = GridComparison(run, load_cluster("h100"), devices)
    found, plan = comparison.expert()
    assert found == parts
    assert plan.devices == devices
    assert plan.pipeline.stages == parts[2]


def test_devices_that_do_not_divide_a_tiny_model_are_an_error_that_names_those_that_do() -> None:
    run = expert_run(CONFIGS / "llama2_7b_expert.yaml")
    with pytest.raises(ConfigError, match=r"devices=3: .* 8 samples,.*\nuse 2, 4 or 8 devices"):
        tiny_run(run, 3)


def test_every_round_runs_all_ways_and_each_begins_one_in_turn() -> None:
    rounds = [plan_order(4, number) for number in range(4)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert [each[0] for each in rounds] == [0, 1, 2, 3]
    assert rounds[1] == [1, 0, 3, 2]


def test_a_speed_up_is_that_within_a_round() -> None:
    expert = MeasuredPlan(("expert 2·1·1",), 1.0, (1.0, 4.0, 2.0))
    auto = MeasuredPlan(("auto",), 0.5, (0.5, 2.0, 1.0))
    found = MeasuredComparison("toy", 2, 16, 64, (expert, auto))
    assert found.speed_ups(auto) == (2.0, 2.0, 2.0)
    assert found.correlation == 1
    assert measured_table(found).row_count == 2


@pytest.mark.slow
@pytest.mark.distributed
def test_ways_are_run_by_processes_and_ranked(tmp_path: Path) -> None:
    file = written(tmp_path, 2, 1, 1)
    (found,) = compare_measured(
        [file], LogFolder(tmp_path / "logs"), devices=2, rounds=2, cluster="h100"
    )
    assert found.model == "small_tiny"
    assert found.run(EXPERT) is found.run(DATA_PARALLEL) is found.runs[0]
    assert {len(each.seconds) for each in found.runs} == {2}
    assert all(0 < each.median < 60 for each in found.runs)
    assert -1 <= found.correlation <= 1
    assert found.run(AUTO).predicted <= min(each.predicted for each in found.runs)

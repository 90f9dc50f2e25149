"""The benchmark of predictions against published measurements."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from benchmarks import bench_published
from benchmarks.__main__ import main
from benchmarks.scatter import scatter

from shardwright.tools.compare.published_rows import read_published
from tools.compare.test_published_rows import planned, row


@pytest.fixture(scope="module")
def prediction() -> bench_published.Prediction:
    return bench_published.predicted(planned(memory_gib=0.5))


def times(prediction: bench_published.Prediction, ratio: float) -> bench_published.Prediction:
    """The prediction if that had been so many times what was measured."""
    return replace(prediction, seconds=ratio * prediction.run.seconds)


def test_a_run_is_predicted_with_its_memory(prediction: bench_published.Prediction) -> None:
    assert prediction.seconds > 0
    assert 0 < prediction.memory < prediction.device_memory
    assert not prediction.is_refused
    assert prediction.utilization * prediction.ratio == pytest.approx(
        prediction.measured_utilization
    )
    assert prediction.throughput * prediction.ratio == pytest.approx(1000)


def test_a_run_is_refused_for_what_is_allocated(prediction: bench_published.Prediction) -> None:
    # The planner compares what is allocated; the published peak is what the allocator reserves.
    for allocated, is_refused in ((0.99, False), (1.01, True)):
        memory = int(allocated * bench_published.RESERVED * prediction.device_memory)
        assert memory > prediction.device_memory
        assert replace(prediction, memory=memory).is_refused == is_refused


def test_goals_that_are_missed_are_named(prediction: bench_published.Prediction) -> None:
    run = prediction.run.model_copy(update={"memory_gib": None})  # type: ignore[attr-defined]
    good = replace(prediction, run=run)
    table = bench_published.by_source([times(good, 1.02), times(good, 0.95), times(good, 1.05)], "")
    assert not table.missed
    assert [line[-1] for line in table.rows] == ["held"]
    table = bench_published.by_source(
        [
            *(times(good, 1.02), times(good, 1.09), times(prediction, 1.4)),
            replace(times(good, 1.0), memory=int(bench_published.RESERVED * 2**40)),
        ],
        "",
    )
    assert "tiny: 40% off, above 30%" in table.missed
    assert "tiny: ran, but needs 1024.0 GiB as predicted" in table.missed
    assert any(goal.startswith("tiny: memory ") for goal in table.missed)


def test_the_order_is_a_goal_where_there_are_ten_rows(
    prediction: bench_published.Prediction,
) -> None:
    def rows(count: int) -> list[bench_published.Prediction]:
        run = prediction.run.model_copy(update={"memory_gib": None})  # type: ignore[attr-defined]
        return [
            replace(
                times(prediction, 1.0),
                run=run,
                utilization=share / count,
                measured_utilization=1 - share / count,
            )
            for share in range(count)
        ]

    assert not bench_published.by_source(rows(9), "").missed
    assert bench_published.by_source(rows(10), "").missed == [
        "a: ρ of utilization -1.00, below 0.7"
    ]


def test_the_layout_predicted_fastest_loses_against_the_best_of_its_sweep(
    prediction: bench_published.Prediction,
) -> None:
    def layout(measured: float, predicted: float, **changes: object) -> bench_published.Prediction:
        figures = {"tokens_per_second_per_device": measured, "memory_gib": None, **changes}
        run = prediction.run.model_copy(update=figures)  # type: ignore[attr-defined]
        return times(replace(prediction, run=run), measured / predicted)

    sweep = [layout(100, 90), layout(90, 95), layout(80, 80), layout(70, 60)]
    assert bench_published.sweep_losses(sweep) == [pytest.approx(0.1)]
    # Another kernel, or another batch, is another sweep.
    others = [layout(200, 90, kernel="fa2"), layout(300, 90, global_batch=64)]
    assert bench_published.sweep_losses([*sweep, *others]) == [pytest.approx(0.1)]
    assert bench_published.sweep_losses(sweep[:3]) == []
    missed = bench_published.by_source(sweep, "").missed
    assert any("the layout predicted fastest loses 10.0% in the median" in goal for goal in missed)


def test_the_picture_has_a_point_with_its_name_for_each_run() -> None:
    groups = {"a100": [("one <1>", 90.0, 110.0)], "h100": [("two", 1000.0, 800.0), ("x", 5, 5)]}
    root = ElementTree.fromstring(scatter("tokens", groups))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 3
    assert circles[0][0].text == "one <1>: 90 measured, 110 predicted"
    assert {each.text for each in root.iter() if each.tag.endswith("text")} > {"a100", "h100"}


def test_rows_that_are_impossible_are_one_error(tmp_path, capsys) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [row(devices=7)]}))
    with pytest.raises(SystemExit):
        main(["--only", "published", "--rows", str(file)])
    assert "rows[0] (tiny): `devices` is 7" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--only", "search", "--rows", str(file)])
    assert "--rows goes with --only published" in capsys.readouterr().err


def test_rows_that_cannot_be_predicted_are_listed_beside_the_others(tmp_path) -> None:
    file = tmp_path / "rows.json"
    others = {
        "tpu": {"hardware": "tpu_v5p"},
        "float8": {"dtype": "fp8"},
        "fast": {"tokens_per_second_per_device": 1e12},
        "few": {"data_parallel": 2, "stages": 2, "devices": 4, "global_batch": 4},
    }
    rows = [row(), *(row(id=name, **changes) for name, changes in others.items())]
    file.write_text(json.dumps({"rows": rows}))
    *_, each_row, left_out = bench_published.run(rows=file)
    assert [line[0] for line in each_row.rows] == ["tiny"]
    reasons = dict(line for line in left_out.rows)
    assert list(reasons) == ["rows[2]", "tpu", "fast", "few"]
    assert "(float8): dtype fp8: clusters have no rates" in reasons["rows[2]"]
    assert "no built-in cluster" in reasons["tpu"]
    assert "1 micro-batches for 2 stages" in reasons["few"]


def test_the_published_rows_are_valid_and_of_several_kinds_of_hardware() -> None:
    fitted = read_published(bench_published.FITTED)
    never_fitted = read_published(bench_published.NEVER_FITTED)
    assert {run.hardware for run in fitted} == {"a100", "h100"}
    vendors = {"a100", "a800", "h800", "b200", "gb300", "mi300x", "ascend910b"}
    assert {run.hardware for run in never_fitted} > vendors
    assert (len(fitted), len(never_fitted)) == (48, 410)
    assert not {run.source for run in fitted} & {run.source for run in never_fitted}

"""Which `mem_coeff` to take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import ConfigError
from shardwright.run.config import Run
from shardwright.tools.compare.tune import Trial, Tuning, tune_mem_coeff

CONFIG = """
model: {name: llama2_7b_tiny, arguments: {num_layers: 1}}
data: {name: text, seq_length: 32, batch_size: 8}
"""
VALUES = (0.00625, 0.1, 6.4, 6.5)


def file(folder: Path, parallel: str = "{}") -> Path:
    path = folder / "run.yaml"
    path.write_text(f"{CONFIG}parallel: {parallel}\n")
    return path


def trial(mem_coeff: float, **changes: object) -> Trial:
    found = {"plan": 1, "stages": 1, "cuts": {}, "bytes": 0, "memory": 1, "seconds": 1.0}
    return Trial(mem_coeff, **{**found, "fits": True, **changes})  # type: ignore[arg-type]


def best(*trials: Trial) -> float | None:
    found = Tuning(4, None, None, trials, {}).best
    return None if found is None else found.mem_coeff


def test_of_all_that_fits_the_fastest_is_best_and_of_equals_the_smallest() -> None:
    fast = trial(2, seconds=0.5)
    assert best(trial(1), fast, trial(3, seconds=0.5)) == 2
    assert best(trial(1), trial(2, seconds=0.5, fits=False)) == 1
    assert best(trial(1, fits=False)) is None


def test_without_a_cluster_it_is_what_leaves_the_fewest_operators_whole() -> None:
    cut = {"a": {"b": 4}, "c": {}}
    whole = {"a": {}, "c": {}}
    assert (
        best(
            trial(1, seconds=None, cuts=whole),
            trial(2, seconds=None, cuts=cut),
            trial(3, seconds=None, cuts=cut),
        )
        == 2
    )


def test_every_value_is_planned_as_it_would_be_alone(tmp_path: Path) -> None:
    run = Run.from_file(file(tmp_path))
    found = tune_mem_coeff(run, 4, VALUES)
    assert [each.mem_coeff for each in found.trials] == list(VALUES)
    alone = Run.from_file(file(tmp_path, "{mem_coeff: 6.4}")).plan(4)
    third = found.trials[2]
    assert (third.bytes, third.memory) == (alone.bytes, alone.memory.peak)
    assert third.plan == found.trials[3].plan != found.trials[0].plan
    assert set(third.cuts) >= {"lm_head", "model.layers.0.mlp.up_proj"}
    assert set(found.break_evens) <= set(third.cuts)


def test_a_memory_limit_says_what_fits(tmp_path: Path) -> None:
    free = tune_mem_coeff(Run.from_file(file(tmp_path)), 4, VALUES)
    limit = min(each.memory for each in free.trials)
    limited = tune_mem_coeff(Run.from_file(file(tmp_path, f"{{memory_limit: {limit}}}")), 4, VALUES)
    assert limited.limit == limit
    assert [each.fits for each in limited.trials] == [each.memory <= limit for each in free.trials]
    assert not all(each.fits for each in limited.trials)


def test_a_mode_without_mem_coeff_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_parallel does not use `mem_coeff`"):
        tune_mem_coeff(Run.from_file(file(tmp_path, "{mode: data_parallel}")), 4)


def test_the_command_prints_plans_break_evens_and_advice_or_json(tmp_path: Path) -> None:
    command = ["tune", str(file(tmp_path)), "--devices", "4", "--cluster", "h100"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    for words in ("mem_coeff", "plan 1:", "break-even", "use mem_coeff", "shortest step time"):
        assert words in shown.stdout
    result = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    times = {each["mem_coeff"]: each["seconds"] for each in result["trials"]}
    assert times[result["best"]] == min(times.values())
    assert str(result["best"]) in shown.stdout

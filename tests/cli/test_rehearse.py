"""`shardwright rehearse`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli import app, rehearse
from shardwright.core.api.rehearsal import Rehearsal
from shardwright.errors import PlanError
from shardwright.run.config import rehearse as of_config

CONFIG = Path(__file__).parents[2] / "examples" / "digits.yaml"


def invoked(*arguments: str) -> tuple[int, str]:
    command = ["rehearse", str(CONFIG), "--devices", "8", *arguments]
    result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_it_shows_what_a_rank_takes_and_sends(tmp_path: Path) -> None:
    status, text = invoked("--rank", "3", "--device", "cpu")
    assert status == 0
    assert "Rank 3 of 8, stage 0, tensors on cpu" in text
    for row in ("start", "step 1", "step 2", "step 3", "checkpoint written", "checkpoint read"):
        assert f"│ {row} " in text
    assert "bytes in a step" in text
    assert "planned: as planned" in text


def test_the_first_and_last_rank_are_rehearsed_on_the_meta_device() -> None:
    status, text = invoked("--json")
    ranks = json.loads(text)["ranks"]
    assert status == 0
    assert [(each["rank"], each["device"]) for each in ranks] == [(0, "meta"), (7, "meta")]
    assert all(each["sent_bytes"] == [each["planned_bytes"]] * 3 for each in ranks)
    assert all(each["checkpoint_bytes"] is None for each in ranks)


def test_the_status_is_1_where_bytes_are_not_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def otherwise(*arguments: object) -> Rehearsal:
        result = of_config.rehearse_run(*arguments)  # type: ignore[arg-type]
        return replace(result, ranks=tuple(replace(r, planned_bytes=1) for r in result.ranks))

    monkeypatch.setattr(rehearse, "rehearse_run", otherwise)
    status, text = invoked("--rank", "0")
    assert status == 1
    assert "1 planned: NOT as planned" in text


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="no rank 8: the plan has 8 devices"):
        invoked("--rank", "8")


def test_the_folder_of_checkpoints_is_left_alone(tmp_path: Path) -> None:
    text = CONFIG.read_text().replace("log_every: 10", "checkpoint: {folder: saved, every: 1}")
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "digits.py").write_text((CONFIG.parent / "digits.py").read_text())
    command = ["rehearse", str(tmp_path / "run.yaml"), "--devices", "8", "--rank", "0"]
    assert CliRunner().invoke(app, [*command, "--device", "cpu"]).exit_code == 0
    assert not (tmp_path / "saved").exists()

"""The text of a program holds no text of a file as code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from sample_models import mlp
from shardwright.core.lower.emit import Source


def named_axis(content: str) -> str:
    return content.replace('"dp"', json.dumps("a if open('run', 'w') else print"))


def named_segment(content: str) -> str:
    plan: dict[str, Any] = json.loads(content)
    for mark in plan["recompute"].values():
        mark["segment"] = "x'); open('run', 'w'); print('"
    return json.dumps(plan)


def named_segment_of_several_lines(content: str) -> str:
    plan: dict[str, Any] = json.loads(content)
    for mark in plan["recompute"].values():
        mark["segment"] = "x\n    open('run', 'w')\r    open('run', 'w')  #"
    return json.dumps(plan)


def planted_plan(plant: Callable[[str], str]) -> tuple[Any, Path]:
    """A model with its arguments, and the file of a plan with code in its names."""
    net, args, kwargs = mlp()
    sw.recompute(net)
    file = Path("plan.json")
    sw.plan(net, args, kwargs, devices=2, mode="data_parallel").save(file)
    content = plant(file.read_text())
    assert "open(" in content
    file.write_text(content)
    return (net, args, kwargs), file


@pytest.mark.parametrize("plant", [named_axis, named_segment])
def test_code_in_the_names_of_a_plan_file_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[str], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call, file = planted_plan(plant)
    sw.check(*call, sw.Plan.load(file))
    assert not Path("run").exists()


def test_names_of_several_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, file = planted_plan(named_segment_of_several_lines)
    with pytest.raises(sw.PlanError, match="has control characters"):
        sw.Plan.load(file)
    assert not Path("run").exists()


def test_a_reference_has_another_name_than_every_variable() -> None:
    source = Source()
    variables = {source.name("gather") for _ in range(8)}
    assert source.refer("gather", torch.add) not in variables


def test_a_reference_is_a_name() -> None:
    source = Source()
    assert source.refer("start; import os", torch.add) == "start_import_os"
    assert source.refer("start; import os", torch.add) == "start_import_os"
    assert source.refer("start  import os", torch.mul) == "start_import_os_1"

"""What two plans decide otherwise, equal blocks as one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.core.plan.diff import Difference, differences


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


Made = Callable[..., sw.Plan]


@pytest.fixture(scope="module")
def made() -> Made:
    """Plans of one model, by their options."""

    def plan(**options: object) -> sw.Plan:
        given = {"devices": 4, "mode": "data_parallel", **options}
        return sw.plan(Layers(), (torch.randn(64, 64),), **given)  # type: ignore[arg-type]

    return plan


def find(found: list[Difference], what: str) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(each.first, each.second, each.names) for each in found if each.what == what]


def test_equal_plans_do_not_differ(made: Made) -> None:
    assert differences(made(), made()) == []


def test_other_storage_is_told_for_all_layers_at_once(made: Made) -> None:
    found = differences(made(), made(hsdp={"threshold": 0}))
    assert find(found, "storage") == [("1·1", "4·1", ("layers.{0..3}.weight",))]
    assert find(found, "sharding") == [("-", "level1", ())]
    assert find(found, "cuts") == []


def test_stages_are_told_for_each_operator_that_moves(made: Made) -> None:
    found = differences(made(), made(stages=2, micro_batches=2))
    assert find(found, "stages") == [("1", "2", ())]
    ((first, second, names),) = find(found, "stage")
    assert (first, second) == ("0", "1")
    assert "layers.{2..3}" in names
    ((_, _, cut),) = find(found, "cuts")
    assert "layers.{0..3}" in cut


def test_of_other_devices_cuts_are_told_in_parts(made: Made) -> None:
    found = find(differences(made(), made(devices=8)), "cuts")
    assert [(first, second) for first, second, _ in found] == [("b/4", "b/8")]


def test_what_is_recomputed_is_told(made: Made) -> None:
    plan = made()
    rows = (replace(row, segment="first" * (row.name < "layers.2")) for row in plan.operators)
    ((first, second, names),) = find(
        differences(plan, replace(plan, operators=tuple(rows))), "recomputed"
    )
    assert (first, second, names) == ("no", "yes", ("layers.{0..1}",))


def test_the_command_prints_differences_and_its_status_says_whether_there_are_any(
    made: Made, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    made().save(one)
    made(hsdp={"threshold": 0}).save(other)
    runner = CliRunner()
    result = runner.invoke(app, ["diff", str(one), str(other)])
    assert result.exit_code == 1
    assert "layers.{0..3}.weight" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    same = runner.invoke(app, ["diff", str(one), str(one)])
    assert (same.exit_code, same.stdout) == (0, "the plans make the same decisions\n")
    assert (
        '"what": "storage"' in runner.invoke(app, ["diff", str(one), str(other), "--json"]).stdout
    )

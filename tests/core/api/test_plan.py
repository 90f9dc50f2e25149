"""`plan` by the seconds of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from features.full_disk_ranks import no_file_above
from sample_models import llama, mlp

Model = tuple[Any, Any, Any]


@pytest.fixture(scope="module")
def model() -> Model:
    return mlp(batch=256, sizes=(512, 512, 512))


def test_a_named_cluster_means_the_cost_model_of_time(model: Model) -> None:
    net, args, kwargs = model
    plan = sw.plan(net, args, kwargs, devices=4, cluster="a100")
    assert plan.options == {"mem_coeff": 0.1, "cost_model": "time", "cluster": "a100"}
    again = sw.plan(net, args, kwargs, devices=4, cluster="a100", cost_model="time")
    assert again.cuts == plan.cuts


def test_a_cluster_may_be_named_for_its_figures_only(model: Model) -> None:
    net, args, kwargs = model
    plan = sw.plan(net, args, kwargs, devices=4, cluster="a100", cost_model="symbolic")
    assert plan.cuts == sw.plan(net, args, kwargs, devices=4).cuts


def test_a_plan_by_time_runs_as_one_device_does() -> None:
    net, args, kwargs = llama()
    plan = sw.plan(net, args, kwargs, devices=4, cluster="h100", mem_coeff=1e6)
    assert plan.cuts
    assert sw.check(net, args, kwargs, plan).passes()


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_a_plan_is_the_same_in_a_region_without_gradients(region: Callable[[], Any]) -> None:
    net, args, kwargs = mlp(batch=8, sizes=(16, 16))
    options: dict[str, Any] = {"devices": 2, "optimizer": torch.optim.AdamW(net.parameters())}
    wanted = sw.plan(net, args, kwargs, **options)
    with region():
        plan = sw.plan(net, args, kwargs, **options)
    assert (plan.cuts, plan.memory) == (wanted.cuts, wanted.memory)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("micro_batches", [1, "auto"])
def test_a_script_saves_graph_plan_and_program(tmp_path: Path, micro_batches: Any) -> None:
    net, args, kwargs = mlp(batch=8, sizes=(16, 16))
    folder = tmp_path / "graphs"
    options: dict[str, Any] = {"devices": 2, "micro_batches": micro_batches}
    plan = sw.plan(net, args, kwargs, **options, save_graphs=folder)
    assert names_in(folder) == ["1_graph.txt", "2_plan.txt", "3_program_rank0.txt"]
    assert (folder / "2_plan.txt").read_text() == plan.dump()
    assert plan.options == sw.plan(net, args, kwargs, **options).options
    with pytest.raises(sw.StrategyError, match="cannot be divided") as error:
        sw.plan(net, args, kwargs, devices=2, stages=3, micro_batches=4, save_graphs=folder)
    assert names_in(folder) == ["1_graph.txt", "2_error.txt"]
    assert (folder / "2_error.txt").read_text() == f"StrategyError: {error.value}\n"


def test_a_class_of_optimizers_is_refused() -> None:
    net, args, kwargs = mlp(batch=8, sizes=(16, 16))
    optimizer: Any = torch.optim.AdamW
    with pytest.raises(sw.PlanError, match=r"AdamW.*: unknown optimizer\n.*an instance of"):
        sw.plan(net, args, kwargs, devices=2, optimizer=optimizer)


def test_exact_finds_a_plan_and_says_how_near_the_optimum_it_is(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    net, args, kwargs = model
    with caplog.at_level(logging.INFO, logger="shardwright.search"):
        plan = sw.plan(net, args, kwargs, devices=4, mode="exact", cluster="a100")
    assert plan.options["cost_model"] == "time"
    assert "of the optimum" in caplog.text


def test_exact_does_not_weigh_symbolic_costs(model: Model) -> None:
    net, args, kwargs = model
    with pytest.raises(sw.StrategyError, match="mode='exact' minimizes seconds"):
        sw.plan(net, args, kwargs, devices=4, mode="exact", cost_model="symbolic")


def test_an_unknown_cluster_is_an_error(model: Model) -> None:
    net, args, kwargs = model
    with pytest.raises(sw.ConfigError, match="a built-in cluster: local, a100"):
        sw.plan(net, args, kwargs, devices=4, cluster="z100")


def test_arguments_that_do_not_stand_in_a_tuple_are_refused_wherever_a_call_is_given() -> None:
    net, x, y = nn.Bilinear(4, 4, 4), torch.ones(8, 4), torch.ones(8, 4)
    plan = sw.plan(net, (x, y), devices=2)
    calls: list[Callable[[], object]] = [
        lambda: sw.plan(net, x, y, devices=2),  # type: ignore[arg-type]
        lambda: sw.check(net, (x,), y, plan),  # type: ignore[arg-type]
        lambda: sw.rehearse(net, (x,), y, plan),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(sw.errors.CaptureError, match=r"must be a (tuple|mapping of names)"):
            call()


def test_a_full_disk_leaves_the_graphs_of_the_earlier_plan(tmp_path: Path) -> None:
    net, args, kwargs = mlp(batch=8, sizes=(16, 16))
    sw.plan(net, args, kwargs, devices=2, save_graphs=tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with no_file_above(20), pytest.raises(OSError, match="File too large"):
        sw.plan(net, args, kwargs, devices=2, save_graphs=tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_name_with_control_characters_leaves_no_graphs(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("a\u202eb\x1b[2J", nn.Linear(8, 8))
    with pytest.raises(sw.CaptureError, match=r"the name 'a\\u202eb\\x1b\[2J' has control"):
        sw.plan(net, (torch.randn(8, 8),), devices=2, save_graphs=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("level", "warns"), [(logging.WARNING, True), (logging.INFO, False)])
def test_costs_that_no_handler_would_show_are_a_warning(
    level: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(8, 8)
    with caplog.at_level(level, "shardwright.search"):
        sw.plan(net, (torch.randn(4, 8),), devices=2, log_costs=True)
    messages = [record.getMessage() for record in caplog.records]
    assert any("logging.basicConfig(level=logging.INFO)" in each for each in messages) == warns
    assert any("the op-cost is" in each for each in messages) != warns

"""Plans as data: saved, loaded, printed, explained, and refused where they do not fit."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import llama, mlp, network
from shardwright.plain_data import EditedFileWarning


def plan_of_network(devices: int = 8) -> sw.Plan:
    net, args, kwargs = network(batch=32)
    return sw.plan(net, args, kwargs, devices=devices, order="topology")


def test_a_saved_plan_loads_equal(tmp_path: Path) -> None:
    for model in (network(batch=32), llama()):
        net, args, kwargs = model
        plan = sw.plan(net, args, kwargs, devices=12)
        plan.save(tmp_path / "plan.json")
        assert sw.Plan.load(tmp_path / "plan.json") == plan


def test_strategies_are_those_of_the_published_search() -> None:
    """Golden case A, weights as torch stores them: (out_features, in_features)."""
    strategies = plan_of_network().strategies
    assert strategies["layer1"] == ((2, 4), (1, 4))
    assert strategies["layer2"] == ((2, 1), (4, 1))
    assert strategies["layer3"] == ((2, 4), (1, 4))


def test_the_table_shows_shapes_cuts_strategies_redistributions_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = plan_of_network().text(full=True)
    for part in (
        "layer1",
        "32×784 512×784 → 32×512",
        "k/tp, b/dp",
        "((2,4),(1,4))",
        "all_reduce over tp",
        "392.0 KiB",
    ):
        assert part in text


def test_the_table_folds_equal_blocks_into_one_row() -> None:
    net, args, kwargs = llama(layers=4)
    text = sw.plan(net, args, kwargs, devices=2, mode="data_parallel").text(every=True)
    assert "layers.{0..3}" in text
    assert "layers.2." not in text


def test_explain_tells_rule_cuts_and_the_way_of_each_input() -> None:
    story = plan_of_network().explain("layer2")
    for part in ("rule: b k, j k -> b j", "cuts: j/tp, b/dp", "vary over tp / all_reduce"):
        assert part in story
    assert "stored sharded 4·1" in story


def test_explain_of_a_saved_plan_says_the_same_with_what_else_costs(tmp_path: Path) -> None:
    net, args, kwargs = llama(batch=16)
    for options in ({}, {"cluster": "h100"}):
        plan = sw.plan(net, args, kwargs, devices=4, **options)  # type: ignore[arg-type]
        plan.save(tmp_path / "plan.json")
        saved = sw.Plan.load(tmp_path / "plan.json")
        for row in plan.operators:
            assert saved.explain(row.name) == plan.explain(row.name)
            assert max(map(len, plan.explain(row.name).splitlines())) <= 80
        unit = "a step more" if options else "(symbolic) more"
        assert unit in saved.explain("model.layers.0.mlp.up_proj")


def test_explain_says_whose_layout_a_follower_has_and_where_its_output_goes() -> None:
    plan = plan_of_network()
    assert "split as layer2 is" in plan.explain("relu@2")
    assert "for layer2: vary over tp / all_reduce" in plan.explain("relu")


def test_a_notebook_shows_the_summary_with_names_as_text() -> None:
    net = nn.Sequential()
    net.add_module("a<b>", nn.Linear(8, 8))
    html = sw.plan(net, (torch.randn(8, 8),), devices=2)._repr_html_()
    assert html.startswith("<pre>Plan for 2 devices") and html.endswith("</pre>")
    assert "a&lt;b&gt;" in html and "<b>" not in html


def test_the_table_names_axes_that_cut_nothing() -> None:
    assert "compute the same result" not in str(plan_of_network())
    net, args, kwargs = network(batch=32)
    text = str(sw.plan(net, args, kwargs, devices=40))
    assert "axis c is unused: groups of 5 devices compute the same result" in text


def test_explain_of_an_unknown_operator_names_the_nearest() -> None:
    with pytest.raises(sw.PlanError, match="no operator 'layr1'\nuse a similar name: layer1"):
        plan_of_network().explain("layr1")


def test_parameter_bytes_are_those_of_the_shards() -> None:
    plan = plan_of_network()
    whole = 4 * (784 * 512 + 512 * 512 + 512)
    assert plan.parameter_bytes == whole // 4


def test_planning_twice_gives_the_same_plan() -> None:
    first, second = plan_of_network(), plan_of_network()
    assert first.cuts == second.cuts
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("devices", [0, -8, 2.0, True])
def test_devices_must_be_a_whole_number_of_at_least_one(devices: object) -> None:
    net, args, kwargs = mlp()
    with pytest.raises(sw.StrategyError, match="must be a whole number of at least 1"):
        sw.plan(net, args, kwargs, devices=devices)  # type: ignore[arg-type]


def test_unknown_options_name_the_valid_ones() -> None:
    net, args, kwargs = mlp()
    with pytest.raises(sw.StrategyError, match="must be one of recursive_programming, "):
        sw.plan(net, args, kwargs, devices=2, mode="magic")
    with pytest.raises(sw.StrategyError, match="mem_coeff=0: must be a positive number"):
        sw.plan(net, args, kwargs, devices=2, mem_coeff=0)
    with pytest.raises(sw.StrategyError, match="order='size': must be one of weight, topology"):
        sw.plan(net, args, kwargs, devices=2, order="size")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_a_batch_of_a_named_tuple_is_named_in_the_plan() -> None:
    class OfPair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair: Any) -> Tensor:
            loss: Tensor = (self.linear(pair[0]) - pair[1]).square().mean()
            return loss

    pair = Pair(torch.zeros(8, 4), torch.zeros(8, 4))
    plan = sw.plan(OfPair(), (pair,), devices=2)
    assert f"{Pair.__module__}:Pair" in sw.Plan.from_json(plan.to_json()).structure


def test_a_plan_of_another_version_or_none_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(sw.PlanError, match=r"plan\.json: no such file"):
        sw.Plan.load(path)
    path.write_text("{")
    with pytest.raises(sw.PlanError, match="not a plan: invalid JSON"):
        sw.Plan.load(path)
    data = json.loads(plan_of_network().to_json())
    path.write_text(json.dumps({**data, "version": 99}))
    with pytest.raises(
        sw.PlanError, match="plan version 99 is not supported; the supported version is 3"
    ):
        sw.Plan.load(path)
    del data["cuts"]
    path.write_text(json.dumps(data))
    with pytest.raises(sw.PlanError, match="invalid plan: `cuts`: Field required"):
        sw.Plan.load(path)


def test_a_plan_for_another_model_is_refused_and_says_what_differs() -> None:
    net, args, kwargs = network(batch=32)
    plan = sw.plan(net, args, kwargs, devices=1)
    other, _, _ = network(batch=32, hidden=256)
    with pytest.raises(sw.PlanError, match=r"parameter 'layer1.weight' is .*256.*in the plan"):
        sw.parallelize(other, sw.Plan.from_json(plan.to_json()), copy=True)
    with pytest.raises(sw.PlanError, match=r"parameter 'layer1.weight' has shape"):
        sw.parallelize(other, plan, copy=True)
    with pytest.raises(sw.PlanError, match="which the model does not have"):
        sw.parallelize(nn.Linear(2, 2), plan)


def test_a_plan_for_many_devices_wants_a_process_group() -> None:
    net, _, _ = network(batch=32)
    with pytest.raises(sw.PlanError, match="for 8 devices, but no process group is running"):
        sw.parallelize(net, plan_of_network(), copy=True)


def test_operators_without_a_rule_are_listed_never_silent() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.trace(self.linear(x))

    args = (torch.randn(8, 8),)
    plan = sw.plan(Odd(), args, devices=2)
    assert len(plan.without_rule) == 1
    assert plan.without_rule[0] in str(plan)
    assert "trace" in str(sw.examine(Odd(), args))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["cuts"].update(layer1={"zz": [0]}),
            "no factor 'zz' that can be sharded",
        ),
        (lambda data: data["cuts"]["layer1"].update(k=[0, 0]), "used more than once"),
        (lambda data: data["cuts"].update(layer9={"k": [0]}), "no operator 'layer9'"),
        (lambda data: data["storage"].pop("layer1.weight"), "list different parameters"),
        (lambda data: data["storage"].update({"layer1.weight": [[0]]}), "is not divisible into"),
        (
            lambda data: data["mesh"].update(device_matrix=[2**40, 2, 2]),
            "use at most 1048576 devices",
        ),
        (lambda data: data.update(devices=7), "`devices` is 7, but `mesh` and `stages` need 8"),
        (lambda data: data.update(bucket_bytes=-1), "`bucket_bytes`: .*greater than or equal to 0"),
        (lambda data: data["operators"][0].update(stage=4), "is on stage 4, but the last is 0"),
        (lambda data: data.update(surprise=1), "`surprise`: Extra inputs"),
    ],
)
def test_a_plan_that_contradicts_itself_or_its_model_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    net, args, kwargs = network(batch=32)
    data = json.loads(sw.plan(net, args, kwargs, devices=8, order="topology").to_json())
    change(data)
    with pytest.raises(sw.PlanError, match=message):
        sw.Plan.from_json(json.dumps(data)).check_fits(sw.capture(net, args, kwargs))


def test_what_takes_long_can_be_derived_with_progress() -> None:
    net, args, kwargs = mlp()
    plan, again = (sw.plan(net, args, kwargs, devices=4, cluster="h100") for _ in range(2))
    heard: list[str] = []
    plan.derive(lambda doing, done=0, of=0: heard.append(doing))
    assert heard == ["memory", "gap"]
    assert (plan.memory, plan.gap) == (again.memory, again.gap)
    plan.derive(lambda doing, done=0, of=0: heard.append(doing))
    assert heard == ["memory", "gap"], "it is cached"


def test_a_plan_that_was_edited_warns_and_is_loaded_as_one_without_a_digest_is(
    tmp_path: Path,
) -> None:
    plan = sw.plan(nn.Linear(8, 8), (torch.zeros(4, 8),), devices=2)
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sw.Plan.load(path) == plan
        earlier = {key: value for key, value in data.items() if key != "digest"}
        path.write_text(json.dumps(earlier))
        assert sw.Plan.load(path) == plan
    path.write_text(json.dumps({**data, "fingerprint": "edited"}))
    with pytest.warns(EditedFileWarning, match=r"plan\.json was edited or damaged"):
        assert sw.Plan.load(path).fingerprint == "edited"


def test_a_name_of_several_lines_in_a_plan_is_refused() -> None:
    text = sw.plan(nn.Linear(8, 8), (torch.zeros(4, 8),), devices=2).to_json()
    data = json.loads(text)
    data["operators"][0]["name"] = "a\nerror: forged"
    with pytest.raises(sw.PlanError, match=r"the name 'a\\nerror: forged' has control characters"):
        sw.Plan.from_json(json.dumps(data))

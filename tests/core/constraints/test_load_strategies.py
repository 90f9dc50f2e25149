"""Strategies in files: plans written and pinned again, files of people, mistakes in them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from random_plans import random_plan
from sample_models import Model, llama, network


def pinned_network() -> Model:
    """The network with layouts whose axes stand in other orders than those of the device matrix."""
    net, args, kwargs = network(batch=32)
    layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
    sw.shard(net.layer1, (layout("mp", ("sp", "dp")), layout("None", ("sp", "dp"))))
    line = sw.Layout((8,), ("tp",))
    sw.shard(
        net.layer2,
        (line("None", "tp"), line("None", "tp")),
        out_strategy=((8, 1),),
        parameter_plan={"weight": (4, 2)},
    )
    return net, args, kwargs


def again(model: Callable[[], Model], plan: sw.Plan, path: Path) -> sw.Plan:
    """The plan of a fresh model that is pinned as the saved strategies say."""
    plan.save_strategies(path)
    net, args, kwargs = model()
    sw.load_strategies(net, path)
    return sw.plan(net, args, kwargs, devices=plan.devices, mode="semi_auto")


def plain_network() -> Model:
    return network(batch=32)


@pytest.mark.parametrize("model", [plain_network, llama])
@pytest.mark.parametrize("devices", [8, 12])
def test_saved_strategies_give_a_fresh_model_the_same_cuts(
    model: Callable[[], Model], devices: int, tmp_path: Path
) -> None:
    net, args, kwargs = model()
    plan = sw.plan(net, args, kwargs, devices=devices)
    assert plan.cuts
    copy = again(model, plan, tmp_path / "strategies.json")
    assert copy.cuts == plan.cuts
    assert copy.storage == plan.storage
    assert (copy.forward_bytes, copy.backward_bytes) == (plan.forward_bytes, plan.backward_bytes)


@pytest.mark.parametrize("model", [plain_network, llama])
@pytest.mark.parametrize("devices", [8, 12])
@pytest.mark.parametrize("from_file", [False, True])
def test_any_cuts_in_any_order_of_axes_and_any_storage_come_back(
    model: Callable[[], Model], devices: int, from_file: bool, tmp_path: Path
) -> None:
    net, args, kwargs = model()
    graph = sw.capture(net, args, kwargs)
    plan = replace(random_plan(graph, devices, seed=devices), outputs={})
    if from_file:
        plan = sw.Plan.from_json(plan.to_json())
    copy = again(model, plan, tmp_path / "strategies.json")
    assert copy.cuts == plan.cuts
    assert copy.storage == plan.storage


@pytest.mark.parametrize("mode", ["semi_auto", "recursive_programming"])
def test_pins_are_saved_as_they_were_said(mode: str, tmp_path: Path) -> None:
    net, args, kwargs = pinned_network()
    plan = sw.plan(net, args, kwargs, devices=8, mode=mode)
    for model in (plain_network, pinned_network):
        copy = again(model, plan, tmp_path / "strategies.json")
        assert copy.cuts == plan.cuts
        assert copy.outputs == plan.outputs
        assert copy.storage == plan.storage
        assert copy.bytes == plan.bytes
    data = json.loads((tmp_path / "strategies.json").read_text())
    (name,) = data["strategies"]["layer1"]["in_strategy"][0]
    assert data["layouts"][name] == {
        "device_matrix": [2, 2, 2],
        "alias_names": ["dp", "sp", "mp"],
    }
    assert data["strategies"]["layer1"] == {
        "in_strategy": [{name: ["mp", ["sp", "dp"]]}, {name: ["None", ["sp", "dp"]]}]
    }


def test_counts_are_written_where_they_say_it_all(tmp_path: Path) -> None:
    def saved(**options: str) -> dict[str, object]:
        net, args, kwargs = network(batch=32)
        plan = sw.plan(net, args, kwargs, devices=8, **options)  # type: ignore[arg-type]
        plan.save_strategies(tmp_path / "strategies.json")
        return json.loads((tmp_path / "strategies.json").read_text())["strategies"]  # type: ignore[no-any-return]

    assert saved(mode="data_parallel")["layer1"] == {"in_strategy": [[8, 1], [1, 1]]}
    assert saved(order="topology")["layer1"] == {"in_strategy": [[2, 4], [1, 4]]}
    # k is cut over the outer axis; counts would give that to the batch.
    matrices = [{"layout": ["dp", "tp"]}, {"layout": ["None", "tp"]}]
    layouts = saved(order="topology", cluster="h100", cost_model="symbolic")
    assert layouts["layer1"] == {"in_strategy": matrices}


def test_counts_are_written_of_operators_in_stages(tmp_path: Path) -> None:
    net, args, kwargs = network(batch=32)
    pipeline = sw.Pipeline(net, 2)
    plan = sw.plan(pipeline, args, kwargs, devices=8, stages=2, mode="data_parallel")
    plan.save_strategies(tmp_path / "strategies.json")
    saved = json.loads((tmp_path / "strategies.json").read_text())["strategies"]
    assert saved["layer1"] == {"in_strategy": [[4, 1], [1, 1]]}


class Shared(nn.Module):
    """One layer that is called twice, and an expanded parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.token = nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(torch.relu(self.layer(x))) * self.token.expand(8, 8)).sum()


def shared() -> Model:
    torch.manual_seed(0)
    return Shared(), (torch.randn(8, 8),), {}


def write(path: Path, strategies: object, **rest: object) -> Path:
    path.write_text(json.dumps({"version": 1, "strategies": strategies, **rest}))
    return path


def test_a_modules_path_stands_for_all_its_calls_unless_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "strategies.json"
    one, other = [[2, 1], [1, 1]], [[1, 1], [2, 1]]
    for said, second in (
        ({"layer": {"in_strategy": one}}, ((2, 1), (1, 1))),
        (
            {"layer": {"in_strategy": one}, "layer@2": {"in_strategy": other}},
            ((1, 1), (2, 1)),
        ),
    ):
        net, args, kwargs = shared()
        sw.load_strategies(net, write(path, said))
        plan = sw.plan(net, args, kwargs, devices=2, mode="semi_auto")
        assert plan.strategies["layer"] == ((2, 1), (1, 1))
        assert plan.strategies["layer@2"] == second


def test_what_only_an_output_carries_is_said_of_the_output(tmp_path: Path) -> None:
    net, args, kwargs = shared()
    said = {"expand": {"in_strategy": [None], "out_strategy": [[4, 1]]}}
    sw.load_strategies(net, write(tmp_path / "strategies.json", said))
    plan = sw.plan(net, args, kwargs, devices=8, mode="semi_auto")
    assert [layout.shard_counts for layout in plan.row("expand").output_layouts] == [(4, 1)]
    assert sw.check(net.double(), (args[0].double(),), kwargs, plan).passes()


def test_a_file_replaces_what_was_pinned_before_and_only_that(tmp_path: Path) -> None:
    net, args, kwargs = network(batch=32)
    sw.shard(net.layer1, ((8, 1), (1, 1)), parameter_plan={"weight": (8, 1)})
    sw.shard(net.layer3, ((1, 8), (1, 8)))
    path = write(tmp_path / "strategies.json", {"layer1": {"in_strategy": [[1, 1], [4, 1]]}})
    sw.load_strategies(net, path)
    plan = sw.plan(net, args, kwargs, devices=8, mode="semi_auto")
    assert plan.strategies["layer1"] == ((1, 1), (4, 1))
    assert plan.strategies["layer3"] == ((1, 8), (1, 8))
    assert plan.mesh.size(plan.storage["layer1.weight"][0]) == 8
    sw.shard(net.layer1, ((2, 1), (1, 1)))
    plan = sw.plan(net, args, kwargs, devices=8, mode="semi_auto")
    assert plan.strategies["layer1"] == ((2, 1), (1, 1))


LAYOUT = {"device_matrix": [2, 4], "alias_names": ["x", "y"]}

MISTAKES = [
    (
        {"layr1": {"in_strategy": [[8, 1], None]}},
        r"the model has no module or operator named 'layr1'.*layer1",
    ),
    ({"layer1.weigth": {"in_strategy": [None]}}, r"shards no tensor"),
    (
        {"layer1.weigth": {"in_strategy": [[1]]}},
        r"no module or operator named 'layer1.weigth'\nclosest",
    ),
    ({"layer1": [[8, 1], [1, 1]]}, r"layer1: must be a JSON object, not \[\[8, 1\], \[1, 1\]\]"),
    ({"layer1": {}}, r"layer1: the entry is empty\nadd `in_strategy`"),
    ({"layer1": {"in_strategi": []}}, r"layer1: unknown key 'in_strategi'\ndid you mean 'in_str"),
    ({"layer1": {"out_strategy": [[8, 1]]}}, r"layer1: `out_strategy` requires `in_strategy`"),
    ({"layer1": {"in_strategy": 8}}, r"layer1: in_strategy: must be a list .*, not 8"),
    (
        {"layer1": {"in_strategy": [8, 1]}},
        r"layer1: in_strategy: 8 is not a valid entry\nuse a list",
    ),
    (
        {"layer1": {"in_strategy": [[8, 0]]}},
        r"layer1: in_strategy: .*\(8, 0\) contains 0\nuse shard counts",
    ),
    (
        {"layer1": {"in_strategy": [["x", None]]}},
        r"contains 'x'\nuse shard counts that are ints of at least 1",
    ),
    (
        {"layer1": {"in_strategy": [{"b": ["x"]}]}},
        r"unknown layout 'b'\nuse one of the file's layouts: 'l'",
    ),
    ({"layer1": {"in_strategy": [{"l": ["z", None]}]}}, r"layer1: in_strategy: unknown axis 'z'"),
    ({"layer1": {"in_strategy": [{"l": [["x", "x"]]}]}}, r"axis 'x' is used more than once"),
    ({"layer1": {"in_strategy": [{"l": [["x", 3]]}]}}, r"a tuple of names, or 'None'"),
    (
        {"layer1": {"parameter_plan": {"wait": [8, 1]}}},
        r"layer1: parameter_plan: .*'wait'\nclosest parameters: w",
    ),
    (
        {"relu": {"in_strategy": [[8, 1]], "parameter_plan": {"weight": [1]}}},
        r"relu: parameter_plan: ReLU has no parameter 'weight'\nclosest parameters: none, the",
    ),
    (
        {"layer1.relu": {"in_strategy": [[8, 1]], "parameter_plan": {"weight": [1]}}},
        r"layer1.relu: only modules take a `parameter_plan`, but this is",
    ),
]


@pytest.mark.parametrize(("strategies", "message"), MISTAKES)
def test_a_mistake_in_a_file_is_named_with_its_place(
    strategies: object, message: str, tmp_path: Path
) -> None:
    net, _, _ = network(batch=32)
    path = write(tmp_path / "strategies.json", strategies, layouts={"l": LAYOUT})
    with pytest.raises(
        (sw.StrategyError, sw.LayoutError), match=rf"(?s)strategies\.json: .*{message}"
    ):
        sw.load_strategies(net, path)
    assert not any("shardwright" in vars(module) for module in net.modules())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "invalid JSON: Expecting"),
        ("[]", "unsupported version None\nuse a strategy file of version 1"),
        ('{"version": 7}', "unsupported version 7\nuse a strategy file of version 1"),
        ('{"version": 1}', "missing key 'strategies'"),
        ('{"version": 1, "strategies": []}', r"strategies: must be a JSON object, not \[\]"),
        ('{"version": 1, "strategy": {}}', "unknown key 'strategy'\ndid you mean 'strategies'"),
        ('{"version": 1, "strategies": {"a": {}, "a": {}}}', "duplicate key 'a'"),
        (
            '{"version": 1, "strategies": {}, "layouts": {"l": {"device_matrix": 8}}}',
            "layouts: l: 'device_matrix' must be a list, not 8",
        ),
        (
            '{"version": 1, "strategies": {},'
            ' "layouts": {"l": {"device_matrix": [8], "alias_names": ["a", "b"]}}}',
            r"layouts: l: .*\ngive one name for each axis",
        ),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "strategies.json").write_text(text)
    with pytest.raises((sw.StrategyError, sw.LayoutError), match=rf"strategies\.json: {message}"):
        sw.load_strategies(nn.Linear(2, 2), tmp_path / "strategies.json")


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(sw.StrategyError, match=r"nothing\.json: no such file"):
        sw.load_strategies(nn.Linear(2, 2), tmp_path / "nothing.json")
    (tmp_path / "binary.ckpt").write_bytes(b"\xff\xfe")
    with pytest.raises(sw.StrategyError, match=r"binary\.ckpt: not UTF-8 text"):
        sw.load_strategies(nn.Linear(2, 2), tmp_path / "binary.ckpt")


def test_an_operator_that_is_not_there_is_named_by_plan_with_the_nearest(tmp_path: Path) -> None:
    net, args, kwargs = network(batch=32)
    path = write(tmp_path / "strategies.json", {"relu.relu": {"in_strategy": [[8, 1]]}})
    sw.load_strategies(net, path)
    with pytest.raises(sw.StrategyError, match=r"'relu\.relu' is pinned as .*\nuse one of .* relu"):
        sw.plan(net, args, kwargs, devices=8, mode="semi_auto")

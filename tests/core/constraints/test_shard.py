"""Pinned modules, functions and parameters: found in the graph, respected, recorded, run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.errors import StrategyError

LAYOUT = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
PINNING_MODES = ("semi_auto", "recursive_programming", "sharding_propagation")


class Digits(nn.Module):
    """784-512-512-10 of matrix products without biases, in small."""

    def __init__(self, inputs: int = 784, hidden: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flatten = nn.Flatten()
        self.fc1_weight = nn.Parameter(torch.randn(inputs, hidden) / 28)
        self.fc2_weight = nn.Parameter(torch.randn(hidden, hidden) / 23)
        self.fc3_weight = nn.Parameter(torch.randn(hidden, 10) / 23)
        self.matmul1 = sw.Op(torch.matmul)
        self.relu1 = sw.Op(torch.relu)
        self.matmul2 = sw.Op(torch.matmul)
        self.relu2 = sw.Op(torch.relu)
        self.matmul3 = sw.Op(torch.matmul)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.relu1(self.matmul1(self.flatten(x), self.fc1_weight))
        x = self.relu2(self.matmul2(x, self.fc2_weight))
        return F.cross_entropy(self.matmul3(x, self.fc3_weight), target)


def digits() -> tuple[Digits, tuple[Tensor, Tensor]]:
    """The network of the tutorial on layouts, pinned as it pins it."""
    net = Digits()
    sw.shard(net.matmul1, (LAYOUT("mp", ("sp", "dp")), LAYOUT(("sp", "dp"), "None")))
    sw.shard(net.relu1, ((4, 1),))
    tp = sw.Layout((8,), ("tp",))
    sw.shard(net.matmul2, (tp("None", "tp"), tp("tp", "None")))
    sw.shard(net.relu2, ((8, 1),))
    return net, (torch.randn(32, 1, 28, 28), torch.arange(32) % 10)


class Block(nn.Module):
    """Two layers that share one activation, and a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.relu = nn.ReLU()
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.down(self.relu(self.up(x)))).square().sum()


X = torch.randn(16, 16)


def plan(net: nn.Module, mode: str = "semi_auto", devices: int = 8) -> sw.Plan:
    return sw.plan(net, (X,), devices=devices, mode=mode)


@pytest.mark.parametrize("mode", PINNING_MODES)
def test_the_network_of_the_tutorial_runs_as_it_is_pinned(mode: str) -> None:
    net, args = digits()
    found = sw.plan(net, args, devices=8, mode=mode)
    assert found.cuts["matmul1"] == {"b": (2,), "k": (1, 0)}
    assert found.cuts["relu1"] == {"b": (0, 1)}
    assert found.cuts["matmul2"] == {"k": (0, 1, 2)}
    assert found.cuts["relu2"] == {"b": (0, 1, 2)}
    assert found.strategies["matmul1"] == ((2, 4), (4, 1))
    assert found.strategies["matmul2"] == ((1, 8), (8, 1))
    result = sw.check(net, args, {}, found)
    assert result.passes(1e-9), result


@pytest.mark.parametrize(
    ("out", "collective"),
    [
        ((2, 1), "all_reduce over a·b"),
        ((8, 1), "reduce_scatter dim 0 over a·b"),
        (LAYOUT(("mp", "sp", "dp"), "None"), "reduce_scatter dim 0 over b·a"),
        ((2, 4), "reduce_scatter dim 1 over a·b"),
    ],
)
def test_an_out_strategy_is_an_all_reduce_or_a_reduce_scatter(out: Any, collective: str) -> None:
    net, args = digits()
    inputs = (LAYOUT("mp", ("sp", "dp")), LAYOUT(("sp", "dp"), "None"))
    sw.shard(net.matmul1, inputs, (out,))
    found = sw.plan(net, args, devices=8, mode="semi_auto")
    steps = [
        s for c in found.row("matmul1").redistributions for s in c.steps if c.value == "matmul1"
    ]
    assert [step.partition(" / ")[0] for step in steps] == [collective]
    result = sw.check(net, args, {}, found)
    assert result.passes(1e-9), result


@pytest.mark.parametrize("mode", PINNING_MODES)
def test_a_module_that_is_called_twice_has_one_strategy(mode: str) -> None:
    net = Block()
    sw.shard(net.relu, ((2, 4),))
    found = plan(net, mode)
    assert found.strategies["relu"] == found.strategies["relu@2"] == ((2, 4),)
    assert set(found.pins) == {"relu", "relu@2"}
    assert sw.check(net, (X,), {}, found).passes(1e-9)


def test_shard_returns_the_module_and_a_later_call_replaces_an_earlier_one() -> None:
    net = Block()
    assert sw.shard(net.up, ((2, 1), (1, 1))) is net.up
    sw.shard(net.up, ((1, 1), (4, 1)))
    assert plan(net).strategies["up"] == ((1, 1), (4, 1))


def test_pins_survive_copies_of_the_module_and_leave_its_state_alone() -> None:
    net = Block()
    names = list(net.state_dict())
    sw.shard(net.up, (LAYOUT("dp", "None"), None), ((2, 1),), {"weight": (1, 8)})
    twin = copy.deepcopy(net)
    assert plan(net).cuts == plan(twin).cuts != {}
    assert plan(net).pins == plan(twin).pins != {}
    assert list(net.state_dict()) == names
    net.up = nn.Linear(16, 32)
    assert plan(net).pins == {}
    assert set(plan(twin).pins) == {"up"}


def test_a_graph_that_was_captured_before_has_the_pins() -> None:
    net = Block()
    sw.shard(net.up, ((2, 4), (1, 4)))
    graph = sw.capture(net, (X,))
    assert sw.plan(graph, devices=8, mode="semi_auto").strategies["up"] == ((2, 4), (1, 4))


def test_a_pin_does_not_change_the_fingerprint() -> None:
    net = Block()
    before = sw.capture(net, (X,)).fingerprint
    sw.shard(net.up, ((2, 4), (1, 4)))
    assert sw.capture(net, (X,)).fingerprint == before


class Calls(nn.Module):
    """Calls a function in `forward`; `inside` is pinned while the module is captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w = nn.Parameter(torch.randn(16, 16))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x, self.w)
        inside = sw.shard(torch.softmax, ((8, 1),))
        return inside(self.function(y, self.w) + self.bias, -1).square().sum()


@pytest.mark.parametrize("mode", PINNING_MODES)
def test_a_function_is_pinned_in_every_call_also_inside_forward(mode: str) -> None:
    net = Calls(sw.shard(torch.matmul, ((2, 4), (4, 1)), ((8, 1),)))
    found = plan(copy.deepcopy(net), mode)
    assert found.strategies["matmul"] == found.strategies["matmul_1"] == ((2, 4), (4, 1))
    assert found.outputs["matmul"] == (((0, 1), ()),)
    assert found.strategies["softmax"] == ((8, 1),)
    assert set(found.pins) == {"matmul", "matmul_1", "softmax"}
    assert sw.check(net, (X,), {}, found).passes(1e-9)


def test_a_pinned_function_computes_what_the_function_computes() -> None:
    pinned = sw.shard(torch.matmul, ((2, 4), (4, 1)))
    torch.testing.assert_close(pinned(X, X), X @ X)
    assert pinned.__name__ == "matmul"


def test_pinning_a_pinned_function_replaces_the_pin() -> None:
    once = sw.shard(torch.matmul, ((2, 4), (4, 1)))
    assert plan(Calls(sw.shard(once, ((8, 1), (1, 1))))).strategies["matmul"] == ((8, 1), (1, 1))


def added(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(torch.zeros(16), x, w)


def test_a_pin_stays_with_the_operator_that_a_function_becomes() -> None:
    found = plan(Calls(sw.shard(added, ((2, 4), (4, 1)))))
    pinned = [name for name, counts in found.strategies.items() if counts == ((2, 4), (4, 1))]
    assert pinned == ["matmul", "matmul_1"]


class Flattened(nn.Module):
    """Rows flattened before the pinned layer, in which they are apart again once captured."""

    def __init__(self, *pin: Any) -> None:
        super().__init__()
        self.product = sw.shard(nn.Linear(16, 16), *pin)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.product(x.reshape(-1, 16))
        return rows.reshape(x.shape).square().sum()


LAY = sw.Layout((4, 2), ("dp", "tp"))


@pytest.mark.parametrize(
    ("shape", "pin", "captured"),
    [
        ((4, 4, 16), (((2, 4, 1), (1, 1)),), ((2, 4, 1), (1, 1))),
        ((4, 4, 16), (((4, 2), (1, 2)),), ((4, 1, 2), (1, 2))),
        ((4, 4, 16), (((8, 1), (1, 1)),), ((4, 2, 1), (1, 1))),
        ((2, 2, 4, 16), (((8, 1), (1, 1)),), ((2, 2, 2, 1), (1, 1))),
        ((4, 4, 16), (((2, 4), (1, 4)), ((8, 1),)), ((2, 1, 4), (1, 4))),
        ((2, 4, 16), ((LAY("dp", "None"), LAY("tp", "None")),), ((2, 2, 1), (2, 1))),
    ],
)
def test_a_pin_has_the_dimensions_of_the_code_or_of_the_graph(
    shape: tuple[int, ...], pin: Any, captured: Any
) -> None:
    net, x = Flattened(*pin), torch.randn(shape)
    found = sw.plan(net, (x,), devices=8, mode="semi_auto")
    assert found.strategies["product"] == captured
    assert sw.check(net, (x,), {}, found).passes(1e-9)


def test_a_pin_that_divides_no_rows_is_an_error_in_the_shapes_of_the_graph() -> None:
    with pytest.raises(StrategyError, match="has size 5, which is not divisible into 2 shards"):
        sw.plan(Flattened(((2, 1), (1, 1))), (torch.randn(3, 5, 16),), devices=2)


def test_a_module_without_children_is_pinned_by_its_main_operator() -> None:
    class Dense(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(super().forward(x))

    net = Block()
    net.up = sw.shard(Dense(16, 32), ((2, 4), (1, 4)))
    assert set(plan(net).pins) == {"up"}


def test_a_module_with_two_paths_is_pinned_once() -> None:
    net = Block()
    net.other = net.relu
    sw.shard(net.relu, ((8, 1),))
    assert set(plan(net).pins) == {"relu", "relu@2"}


def test_the_model_itself_may_be_one_operator() -> None:
    net = sw.shard(nn.Linear(16, 16), ((2, 1), (4, 1)))
    assert plan(net).strategies["linear"] == ((2, 1), (4, 1))


def test_parameters_are_stored_as_planned_and_used_as_the_operator_needs_them() -> None:
    net = Block()
    sw.shard(net.up, ((2, 4), (1, 4)), parameter_plan={"weight": (2, 4), "bias": (8,)})
    sw.shard(net, parameter_plan={"down.weight": LAYOUT("mp", ("sp", "dp"))})
    for mode in ("semi_auto", "data_parallel"):
        if mode == "data_parallel":
            sw.shard(net.up, parameter_plan={"weight": (2, 4), "bias": (8,)})
        found = plan(net, mode)
        layouts = {name: axes for name, axes in found.storage.items() if any(axes)}
        assert layouts["up.bias"] == ((0, 1, 2),)
        assert layouts["down.weight"] == ((2,), (1, 0))
        assert [found.mesh.size(axes) for axes in layouts["up.weight"]] == [2, 4]
        assert sw.check(net, (X,), {}, found).passes(1e-9)


def test_a_tied_parameter_may_be_planned_by_any_of_its_names() -> None:
    net = Block()
    net.down.weight = nn.Parameter(torch.randn(16, 32))
    net.second = nn.Linear(32, 16, bias=False)
    net.second.weight = net.down.weight
    sw.shard(net.second, parameter_plan={"weight": (8, 1)})
    found = plan(net)
    assert [found.mesh.size(axes) for axes in found.storage["down.weight"]] == [8, 1]


def test_the_plan_records_and_shows_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    net = Block()
    sw.shard(net.up, (LAYOUT("dp", ("sp", "mp")), None), ((8, 1),))
    found = plan(net)
    loaded = sw.Plan.from_json(found.to_json())
    assert loaded == found
    assert loaded.pins["up"].inputs == (LAYOUT("dp", ("sp", "mp")), None)
    assert [row.name for row in loaded.operators if row.pinned] == ["up"]
    assert "((2,4),(1,4)) pinned" in loaded.text(full=True)
    pinned = "pinned by the user to ((dp, sp·mp) on (dp 2, sp 2, mp 2),None) → ((8,1),)"
    assert pinned in loaded.explain("up")


def pin(**named: Any) -> Callable[[Block], Any]:
    """Pins one of the block's modules by name; `net` is the block itself."""
    return lambda net: [
        sw.shard(net if name == "net" else getattr(net, name), *given)
        for name, given in named.items()
    ]


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (
            pin(spare=(((1, 1), (1, 1)),)),
            r"module 'spare' .* has no operator in the graph",
        ),
        (
            pin(net=(((2, 4), (1, 1)),)),
            r"the model \(Block\) is called with tensors of shapes \[16, 16\], but its pin",
        ),
        (
            pin(up=(((2, 4), (4, 1)),)),
            r"^up: strategy .*aten.linear\(x \[16, 16\], up.weight",
        ),
        (
            pin(up=(((2, 4), (1, 4), (1,)),)),
            "3 entries for 2 tensor inputs\ngive no entry for the bias",
        ),
        (
            pin(down=(((16, 1), (1, 1)),)),
            r"^down: .*16 shards \(b 16\), but there are only 8 devices",
        ),
        (pin(spare=(None, None, {"bias": (1,)})), "no operator uses the parameter 'spare.bias'"),
        (
            pin(up=(None, None, {"weight": (2, 1)}), net=(None, None, {"up.weight": (4, 1)})),
            "the parameter 'up.weight' has two conflicting entries",
        ),
        (
            pin(up=(None, None, {"weight": (3, 1)})),
            "up.weight .* size 32, which is not divisible into 3 shards",
        ),
    ],
)
def test_a_pin_that_fits_nothing_is_refused(shard: Callable[[Block], Any], message: str) -> None:
    net = Block()
    shard(net)
    with pytest.raises(sw.StrategyError, match=message):
        plan(net)


def test_a_layout_of_another_number_of_devices_is_refused() -> None:
    net = Block()
    sw.shard(net.up, (LAYOUT("dp", "None"), None))
    with pytest.raises(sw.LayoutError, match=r"up: the device matrix .*the plan is for 4"):
        plan(net, devices=4)


def test_a_function_of_several_operators_is_refused_with_their_names() -> None:
    net = Calls(sw.shard(lambda x, w: torch.exp(x).cos(), ((8, 1),)))
    message = r"function called at test_shard.py:\d+ has 2 operators, .*: exp, cos"
    with pytest.raises(sw.StrategyError, match=message):
        plan(net)


def test_a_pinned_function_whose_result_is_not_used_is_refused() -> None:
    class Unused(Block):
        def forward(self, x: Tensor) -> Tensor:
            sw.shard(torch.exp, ((8, 1),))(x)
            return super().forward(x)

    with pytest.raises(
        sw.StrategyError, match=r"test_shard.py:\d+ is pinned as \(\(8,1\),\), but the graph has no"
    ):
        plan(Unused())


def test_an_operator_that_is_pinned_twice_is_refused() -> None:
    net = Block()
    net.relu = sw.Op(sw.shard(torch.relu, ((8, 1),)))  # type: ignore[assignment]
    sw.shard(net.relu, ((4, 1),))
    with pytest.raises(
        sw.StrategyError, match=r"operator 'relu' has two conflicting pins, \(\(4,1\),\) and"
    ):
        plan(net)


@pytest.mark.parametrize("mode", ["data_parallel", "stand_alone"])
def test_modes_that_decide_everything_refuse_pins(mode: str) -> None:
    net = Block()
    sw.shard(net.relu, ((8, 1),))
    message = f"mode='{mode}' decides every operator itself, but `shard` pins relu, relu@2\n"
    remedy = "use one of the modes that support pinned operators: rec.*semi_auto"
    with pytest.raises(sw.StrategyError, match=message + remedy):
        plan(net, mode)


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        (torch.relu, {}, "`shard` requires `in_strategy` or `parameter_plan`"),
        (torch.relu, {"out_strategy": ((8, 1),)}, "`out_strategy` requires `in_strategy`"),
        (torch.relu, {"in_strategy": (8, 1)}, "in_strategy .* has the int 8"),
        (
            torch.relu,
            {"in_strategy": ((0, 1),)},
            "contains 0\nuse shard counts that are ints of at least 1",
        ),
        (
            torch.relu,
            {"in_strategy": ((8,),), "parameter_plan": {}},
            "only modules take a `parameter_plan`: a function",
        ),
        (nn.ReLU, {"in_strategy": ((8, 1),)}, "`shard` takes a module or a function, not <class"),
        ("relu", {"in_strategy": ((8, 1),)}, "`shard` takes a module or a function, not 'relu'"),
        (
            nn.Linear(2, 2),
            {"parameter_plan": {"self.weight": (2, 1)}},
            "Linear has no parameter 'self.weight'\nclosest parameters: weight",
        ),
        (
            nn.Linear(2, 2),
            {"parameter_plan": {"weight": (2, 0)}},
            r"parameter_plan of 'weight': \(2, 0\) contains 0",
        ),
    ],
)
def test_shard_refuses_at_once_what_needs_no_shapes(
    target: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(sw.StrategyError, match=message):
        sw.shard(target, **given)


def test_op_takes_functions_only() -> None:
    with pytest.raises(sw.StrategyError, match="`Op` takes a function, not ReLU"):
        sw.Op(nn.ReLU())
    assert repr(sw.Op(torch.matmul)) == "Op(matmul)"

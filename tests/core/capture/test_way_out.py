"""Every refusal of capture ends with a call of `sw.local_map` that makes it needless."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import shardwright as sw
from shardwright.core.capture.annotations import module_tags
from shardwright.core.capture.local_trace import example_entries
from shardwright.core.capture.way_out import _notation_for_module


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if x.isnan().any():
            return x
        y: Tensor = self.linear(x) * mask[:, None]
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branching()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x, mask)
        return y.mean()


class Selecting(nn.Module):
    """Its shapes depend on values, which shows once it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].median()


ARGS = (torch.randn(8, 4), torch.ones(8))


def remedy(net: nn.Module, *args: Any) -> str:
    with pytest.raises(sw.CaptureError) as raised:
        sw.capture(net, args)
    found = re.search(
        r"`(sw\.local_map\(.*\))`(; the loss is then .* as under DDP)?(; .*)?$", str(raised.value)
    )
    assert found is not None, raised.value
    return found[1]


def test_the_innermost_refused_module_is_named_and_the_call_helps() -> None:
    net = Net()
    call = remedy(net, *ARGS)
    assert call == "sw.local_map(net.get_submodule('layers.0'), \"b _h, b -> b _h\")"
    eval(call)
    assert sw.check(net, ARGS, None, sw.plan(net, ARGS, devices=2)).passes()


def test_the_whole_model_is_named_where_it_is_refused_itself() -> None:
    net = Selecting()
    call = remedy(net, ARGS[0])
    assert call == 'sw.local_map(net, "b _ -> ()", partial="mean")'
    eval(call)
    assert len(sw.capture(net, ARGS[:1]).ops) == 1


def test_a_module_of_which_traced_operators_are_refused_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Selecting())
    call = remedy(net, ARGS[0])
    assert call == "sw.local_map(net.get_submodule('1'), \"_ _ -> ()\")"
    eval(call)
    assert sw.check(net, ARGS[:1], None, sw.plan(net, ARGS[:1], devices=2)).passes()


class Kept(nn.Module):
    """Selects values of each sample, which shows once it is traced; returns other sizes."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        middle = x[x > 0].median()
        total: Tensor = middle * 0 + x[..., :3].sum(1) * scale[:, None]
        return total


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept, self.last = nn.Linear(4, 4), Kept(), nn.Linear(3, 1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.last(self.kept(self.linear(x), scale)).square().mean()  # type: ignore[no-any-return]


def test_the_call_for_a_traced_module_has_its_arguments_and_its_result() -> None:
    net, args = Outer(), (torch.randn(8, 5, 4), torch.ones(8))
    call = remedy(net, *args)
    assert call == "sw.local_map(net.get_submodule('kept'), \"b _ _, b -> b 3\")"
    eval(call)
    assert sw.check(net, args, None, sw.plan(net, args, devices=2)).passes()


class Branches(nn.Module):
    """Two modules that are refused; the first returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Described(), Branching()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).value, mask).mean()
        return y


class Described(nn.Module):
    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(value=x if x.isnan().any() else x * 2)


def test_only_a_call_with_which_the_model_is_captured_is_named() -> None:
    net = Branches()
    call = remedy(net, *ARGS)
    assert call == 'sw.local_map(net, "b _, b -> ()", partial="mean")'
    assert not module_tags(net)
    eval(call)
    assert sw.check(net, ARGS, None, sw.plan(net, ARGS, devices=2)).passes()


def test_no_call_is_named_where_arguments_are_of_other_samples() -> None:
    with pytest.raises(sw.CaptureError, match="depends on the value") as raised:
        sw.capture(Branches(), (ARGS[0], torch.ones(1)))
    assert "local_map" not in str(raised.value)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return self.last(self.rnn(packed)[1][-1]).square().mean()  # type: ignore[no-any-return]


def test_a_list_of_lengths_is_to_be_passed_as_a_tensor() -> None:
    net, x, lengths = Packed(), torch.randn(4, 3, 4), [3, 1, 2, 3]
    with pytest.raises(sw.CaptureError, match="as a tensor, not as a list"):
        sw.capture(net, (x, lengths))
    eval(remedy(net, x, lengths))
    args = (x, torch.tensor(lengths))
    assert sw.check(net, args, None, sw.plan(net, args, devices=2)).passes()


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(16, 4))
        self.register_buffer("start", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y, start = self.linear(x), int(self.start)
        with torch.no_grad():
            self.queue[start : start + len(y)] = y
            self.start[0] = (start + len(y)) % 16
        return (y @ self.queue.T.clone()).mean()


def test_no_call_is_named_for_a_model_that_updates_the_buffer_it_branches_on() -> None:
    with pytest.raises(sw.CaptureError, match="updates the buffer 'start'") as raised:
        sw.capture(Queue(), ARGS[:1])
    assert "local_map" not in str(raised.value)


def test_an_error_of_the_model_itself_names_no_local_map() -> None:
    with pytest.raises(sw.CaptureError, match="the model itself raises") as raised:
        sw.capture(nn.Sequential(nn.Linear(4, 4)), (torch.randn(8, 5),))
    assert "local_map" not in str(raised.value)


def test_sizes_that_depend_on_values_are_no_batch() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        rows = torch.ones(4).nonzero()
        assert example_entries([rows, torch.ones(3, 2)]) == "_ _, b _"
        assert _notation_for_module([torch.ones(4, 2)], rows) == "_ _ -> _ 1"

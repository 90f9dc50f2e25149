"""Attributes that are set between steps take effect; those that `forward` changes are refused."""

from __future__ import annotations

import copy
import functools
import random
import sys
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.attributes import BUFFERS, state_text
from shardwright.core.parallel.python_state import PythonState
from shardwright.errors import CaptureError, PlanError

BATCH = torch.randn(4, 8)


FACTOR, SHIFTS, TABLE = 1.0, [0.0], np.ones(8, dtype=np.float32)


class Config:
    def __init__(self) -> None:
        self.power = 1
        self.sizes = [1.0, 2.0]


class Scaled(nn.Module):
    shift, scale = 0.5, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.alpha, self.name, self.pair = 2.0, "tanh", (1.0, 3.0)
        self.mask = torch.ones(8)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(torch, self.name)(self.linear(x)) * self.alpha * self.mask
        result: Tensor = self.drop(y * self.pair[1] + self.shift) * getattr(self, "factor", 1.0)
        return self.scale * result * factor_of(self) + self.shifts()

    def shifts(self) -> Tensor:
        return sum(SHIFTS) + torch.tensor(TABLE)


def factor_of(net: nn.Module) -> float:
    return FACTOR if net.training else -FACTOR


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.flag = True
        self.inner = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) ** self.config.power * sum(self.config.sizes)
        return (y if self.flag else -y).square().mean() + y.sum()


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden: Tensor | None = None
        self.num_rows = 0
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.linear(x)
        self.num_rows = len(x)
        return self.hidden.square().mean()


def in_place(net: Any) -> None:
    net.inner.mask[2] = 5.0


def freeze(net: Any) -> None:
    net.inner.linear.weight.requires_grad_(False)


def train_differently(net: Any) -> None:
    net.inner.drop.p = 0.0
    net.eval()


def delete(net: Any) -> None:
    net.inner.factor = 3.0
    del net.inner.factor


def change_globals(net: Any) -> None:
    """For the module and for what was planned of it."""
    global FACTOR
    FACTOR = 3.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda net: setattr(net.inner, "alpha", 0.5),
    "text": lambda net: setattr(net.inner, "name", "relu"),
    "tuple": lambda net: setattr(net.inner, "pair", (1.0, 7.0)),
    "tensor": lambda net: setattr(net.inner, "mask", torch.arange(8.0)),
    "tensor in place": in_place,
    "class attribute": lambda net: setattr(net.inner, "shift", 1.5),
    "new attribute": lambda net: setattr(net.inner, "factor", 2.0),
    "deleted": delete,
    "root": lambda net: setattr(net, "flag", False),
    "class": lambda net: setattr(type(net.inner), "scale", 0.25),
    "global variable": change_globals,
    "global list in place": lambda net: SHIFTS.__setitem__(0, 4.0),
    "global array in place": lambda net: TABLE.__setitem__(2, 4.0),
    "object": lambda net: setattr(net.config, "power", 2),
    "list in an object": lambda net: net.config.sizes.append(4.0),
    "trained": freeze,
    "mode": train_differently,
}


def gradients(net: nn.Module) -> list[Tensor | None]:
    net.zero_grad()
    net(BATCH).backward()
    return [parameter.grad for parameter in net.parameters()]


def parallel(net: nn.Module) -> Any:
    return sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)


def test_attributes_that_are_set_between_steps_take_effect() -> None:
    net = Net()
    planned = parallel(net)
    for name, change in CHANGES.items():
        change(net)
        change(planned)
        for wanted, got in zip(gradients(net), gradients(planned), strict=True):
            assert (wanted is None) == (got is None), name
            if wanted is not None and got is not None:
                torch.testing.assert_close(got, wanted, msg=name)


def test_attributes_that_are_set_take_effect_in_train_step() -> None:
    net = Net()
    planned = parallel(net)
    net.inner.alpha = planned.inner.alpha = 0.25
    loss = net(BATCH)
    loss.backward()
    torch.testing.assert_close(planned.train_step(BATCH), loss.detach())
    for wanted, got in zip(net.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def test_a_state_that_was_seen_before_is_not_captured_again() -> None:
    planned = parallel(Net())
    for alpha in (0.5, 0.25, 0.5, 2.0, 0.25):
        planned.inner.alpha = alpha
        planned(BATCH)
    assert len(planned.execution._forwards) == 3
    planned.unread = planned.inner.unread = 1
    planned(BATCH)
    assert len(planned.execution._forwards) == 3


def test_an_equal_number_of_another_type_is_another_state() -> None:
    planned = parallel(Net())
    for alpha in (2, 2.0, 2, True, 1):
        planned.inner.alpha = alpha
        planned(BATCH)
    assert len(planned.execution._forwards) == 4


def test_what_forward_sets_is_set_by_each_call() -> None:
    net = Storing()
    planned = parallel(net)
    for batch in (BATCH, torch.randn(4, 8), torch.randn(2, 8)):
        losses = []
        for model in (net, planned):
            model.zero_grad()
            loss = model(batch)
            (loss + model.hidden.mean()).backward()
            losses.append(loss)
        assert torch.equal(*losses) and torch.equal(net.hidden, planned.hidden)
        assert torch.equal(net.linear.weight.grad, planned.linear.weight.grad)
        assert planned.num_rows == len(batch)


class Spreading(Storing):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.hidden = self.hidden.std()
        return loss


def test_what_micro_batches_do_not_determine_is_not_left_from_before() -> None:
    net = Spreading()
    planned: Any = sw.parallelize(
        net, sw.plan(net, (BATCH,), devices=1, micro_batches=2), copy=True
    )
    planned.train_step(BATCH)
    uses: list[Callable[[Any], Any]] = [
        lambda hidden: hidden + 1,
        lambda hidden: torch.ones(()) * hidden,
        lambda hidden: hidden.detach(),
        lambda hidden: torch.stack([hidden]),
        lambda hidden: float(hidden),
        lambda hidden: hidden[0],
    ]
    for use in uses:
        with pytest.raises(PlanError, match="mixes samples, so that micro-batches do not"):
            use(planned.hidden)


def test_what_summed_micro_batches_would_set_is_not_left_from_before() -> None:
    net = Storing()
    summed = sw.Pipeline(net, 2, loss_reduction="sum")
    planned: Any = sw.parallelize(net, sw.plan(summed, (BATCH,), devices=1), copy=True)
    planned.train_step(BATCH)
    with pytest.raises(PlanError, match="'hidden' is set by `forward`"):
        planned.hidden.detach()


def test_a_plan_is_for_the_attributes_that_it_was_made_with() -> None:
    net = Net()
    plan = sw.plan(net, (BATCH,), devices=1)
    net.inner.alpha = 0.5
    with pytest.raises(PlanError, match="another model"):
        sw.parallelize(net, plan, copy=True)


def test_a_replaced_submodule_is_refused_at_the_next_call() -> None:
    planned = parallel(Net())
    planned.inner.linear = nn.Linear(8, 8)
    with pytest.raises(PlanError, match="submodule of module 'inner' was replaced"):
        planned(BATCH)


def test_a_replaced_or_parametrized_parameter_is_refused_at_the_next_call() -> None:
    for change in (
        lambda linear: setattr(linear, "weight", nn.Parameter(torch.zeros(8, 8))),
        nn.utils.parametrizations.weight_norm,
    ):
        planned = parallel(Net())
        change(planned.inner.linear)
        for call in (planned, planned.train_step):
            with pytest.raises(PlanError, match=r"'inner.linear.weight' was replaced after plan"):
                call(BATCH)


def test_the_guard_takes_about_as_long_as_to_list_all_modules() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Scaled() for _ in range(4))
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x) * self.scale
            return x

    net = nn.Sequential(*(Layer() for _ in range(32)))
    for child in list(net.modules())[::10]:
        child.register_forward_pre_hook(lambda module, args: args)
    planned = parallel(net)
    assert len(list(planned.modules())) > 400

    def least(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=1, repeat=500))

    assert least(planned.execution._state.key) < 4 * least(lambda: list(planned.modules()))


class Counting(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.alpha += 1
        return super().forward(x)


class Appending(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class Averaging(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.mask = self.mask * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x)


class AveragingInPlace(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.mask.mul_(0.9)
        return super().forward(x)


class Drawing(Scaled):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.generator.random()


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState])
def test_an_own_generator_that_forward_draws_from_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(
        CaptureError, match=r"attribute '0.generator' (?s:.*)register it as a buffer"
    ):
        sw.plan(nn.Sequential(Drawing(make())), (BATCH,), devices=2)


class Recurrent(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x) if self.state is None else self.state
        self.state = super().forward(x + before)
        return self.state


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counting, "alpha"),
        (Appending, "seen"),
        (Averaging, "mask"),
        (AveragingInPlace, "mask"),
        (Recurrent, "state"),
    ],
)
def test_an_attribute_that_forward_changes_for_the_next_call_is_refused(
    kind: type[nn.Module], name: str
) -> None:
    net = nn.Sequential(kind())
    before = copy.deepcopy(vars(net[0])[name])
    with pytest.raises(CaptureError, match=rf"attribute '0.{name}' (?s:.*)register it as a buffer"):
        sw.plan(net, (BATCH,), devices=2)
    assert str(vars(net[0])[name]) == str(before), "capture leaves the module as it is"


def test_what_is_kept_does_not_grow_with_changes_back_and_forth() -> None:
    module = Scaled()
    state = PythonState(module, [("", "alpha", "1.0")], {})
    keys, blocks = set(), []
    for step in range(3001):
        module.alpha = 1e6 + step % 2
        keys.add(state.key())
        if step % 1000 == 0:
            blocks.append(sys.getallocatedblocks())
    assert len(keys) == 2
    assert blocks[3] - blocks[1] < 500


def test_buffers_whose_values_were_read_are_told_when_they_have_changed() -> None:
    net = nn.Module()
    net.register_buffer("mask", torch.ones(4))
    place = (BUFFERS, "mask", state_text(BUFFERS, net.mask))
    state = PythonState(net, [place], {})
    before = state.key()
    net.mask = net.mask.clone()
    assert state.key() is before
    assert not state.changed_buffers
    net.mask[0] = 0
    assert state.key() is not before
    assert state.changed_buffers == ["mask"]
    net.mask = None  # As in another pipeline stage.
    assert state.key().contents == before.contents


class Causal(nn.Module):
    """Keeps the mask of the last length, as a tutorial of PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), len(x)).tril()
        return (self.mask @ self.linear(x)).square().mean()


def test_what_a_model_makes_of_the_length_is_made_by_a_plan_too() -> None:
    net = Causal()
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    assert net.mask is None
    wanted = net(BATCH)
    torch.testing.assert_close(planned(BATCH), wanted)


class Bound(nn.Module):
    """Calls a method of its own by `functools.partial`, and counts in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.head = functools.partial(self.scaled, factor=2.0)

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return self.linear(x) * factor

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(x).square().mean()
        return loss


def test_bound_methods_in_attributes_are_those_of_the_captured_copy_for_other_sizes_too() -> None:
    net, eager = Bound(), Bound()
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1))
    for x in (BATCH, BATCH[:2]):
        for each in (planned, eager):
            each.zero_grad()
            each(x).backward()
        torch.testing.assert_close(planned.linear.weight.grad, eager.linear.weight.grad)

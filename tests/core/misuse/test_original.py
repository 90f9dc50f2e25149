"""What users do to the model that they gave to `parallelize` instead of to what that returned."""

from __future__ import annotations

import copy
import gc
import logging
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.misuse.original import OriginalModel
from shardwright.errors import PlanError


class Options:
    power = 1

    def __init__(self) -> None:
        self.factor = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.options, self.unread = 1.0, Options(), 0
        self.first, self.dropout, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)
        self.mask = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.first(x)) * self.scale * self.mask
        return self.last(hidden * self.options.factor).square().mean()


X = torch.ones(2, 4)


def pair() -> tuple[Net, Any]:
    net = Net()
    return net, sw.parallelize(net, sw.plan(net, (X,), devices=1), copy=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def replace_last(net: Net) -> None:
    net.last = nn.Linear(4, 1)


def load(net: Net) -> None:
    net.load_state_dict({name: t + 1 for name, t in net.state_dict().items()})


CHANGES: dict[str, Callable[[Net], object]] = {
    "attribute 'scale'": lambda net: setattr(net, "scale", 2.0),
    "attribute 'dropout.p'": lambda net: setattr(net.dropout, "p", 0.0),
    "attribute 'dropout.training'": lambda net: net.eval(),
    "attribute 'options'": lambda net: setattr(net.options, "factor", 2.0),
    "attribute 'mask'": lambda net: setattr(net, "mask", torch.zeros(4)),
    "submodules (and 1 more)": replace_last,
    "requires_grad of parameters of 'first'": lambda net: net.first.requires_grad_(False),
    "values of parameters of 'first' (and 1 more)": load,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_without_effect_is_said_once(what: str, caplog: pytest.LogCaptureFixture) -> None:
    net, planned = pair()
    CHANGES[what](net)
    with caplog.at_level(logging.WARNING, "shardwright"):
        for _ in range(3):
            planned(X)
    (message,) = warnings(caplog)
    assert message.startswith(f"{what} of the `Net` that was passed to `sw.parallelize` changed")


@pytest.mark.parametrize("what", list(CHANGES)[:5])
def test_what_is_changed_in_both_is_not_said(what: str, caplog: pytest.LogCaptureFixture) -> None:
    net, planned = pair()
    for each in (net, planned):
        CHANGES[what](each)
    with caplog.at_level(logging.WARNING, "shardwright"):
        planned(X)
    assert not warnings(caplog)


def test_what_is_legitimate_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    net, planned = pair()
    reference, optimizer = copy.deepcopy(net), torch.optim.SGD(planned.parameters(), 0.1)
    own = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    with caplog.at_level(logging.WARNING, "shardwright"):
        for _ in range(4):
            net.unread += 1
            for model, steps in ((net, own), (planned, optimizer)):
                model(X).backward()
                steps.step()
                steps.zero_grad()
        with sw.whole(planned) as whole:
            whole(X)
        plan = sw.plan(net, (X,), devices=1)
        sw.check(net, (X,), None, plan)
        sw.parallelize(net, plan, copy=True)(X)
        reference.eval()
        planned(X)
        copy.deepcopy(planned).eval()(X)
    assert not warnings(caplog)


def test_that_the_model_is_trained_instead_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    sw.parallelize(net, sw.plan(net, (X,), devices=1), copy=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, "shardwright"):
        for _ in range(4):
            net(X).backward()
            optimizer.step()
    (message,) = warnings(caplog)
    assert message.startswith("the `Net` that was passed to `sw.parallelize` is trained")
    assert "net = sw.parallelize(net, plan)" in message


def test_a_teacher_and_a_reference_are_called_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shardwright"):
        for prepare in (lambda net: net.eval(), lambda net: net.requires_grad_(False)):
            teacher, planned = pair()
            for each in (teacher, planned):
                prepare(each)
            for _ in range(4):
                teacher(X)
        reference, planned = pair()
        for _ in range(4):
            with torch.no_grad():
                reference(X)
        planned(X).backward()
        for _ in range(4):
            reference(X).backward()
            copy.deepcopy(reference)(X)
    assert not warnings(caplog)


def test_an_optimizer_over_the_parameters_of_the_other_model_is_refused() -> None:
    net, planned = pair()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    planned(X).backward()
    with pytest.raises(
        PlanError, match=r"(?s)this SGD, which was created before `sw.parallelize`, .*sw\.adopt"
    ):
        optimizer.step()
    sw.adopt(optimizer, planned).step()


def test_training_the_model_that_was_given_by_an_optimizer_of_the_other_is_refused() -> None:
    net, planned = pair()
    optimizer = torch.optim.SGD(planned.parameters(), 0.1)
    net(X).backward()
    with pytest.raises(
        PlanError, match=r"'first.weight' of the model passed to.* has\ncall the planned"
    ):
        optimizer.step()


def test_the_model_is_not_kept_alive() -> None:
    net, planned = pair()
    gone = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert gone() is None
    finally:
        gc.enable()
    planned(X)


def test_to_look_takes_little_of_a_step() -> None:
    net = nn.Sequential(*(nn.Dropout(0.5) for _ in range(1000)))
    read = tuple((str(n), name, "") for n in range(1000) for name in ("p", "training", "inplace"))
    original = OriginalModel(net, read)
    for _ in range(10):
        original.check(net)
    count = 640
    assert timeit.timeit(lambda: original.check(net), number=count) / count < 2e-4

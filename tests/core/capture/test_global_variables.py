"""Which global variables a `forward` may read, and that it does not change them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.global_variables import GLOBALS, globals_of, globals_read

BATCH = torch.ones(2, 4)
SETTINGS = """
scale = 2.0
unread = 3.0
offset = 1.0

def shifted(x):
    return x + offset
"""
MODEL = """
import math
import torch
from torch import nn
import settings_of_the_user as settings
from settings_of_the_user import shifted

LOG, UNREAD, DEPTH, TABLE = [], 5.0, 2, {"a": 1.0}

def helper(x):
    return [x for _ in range(DEPTH)][0]

class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.double(shifted(helper(self.linear(x)) * settings.scale)) * math.pi

    def double(self, x):
        return 2 * x * TABLE["a"]

    def never_called(self):
        return UNREAD

class Logging(Reading):
    def forward(self, x):
        LOG.append(1)
        return super().forward(x)

class Counting(Reading):
    def forward(self, x):
        global DEPTH
        DEPTH += 1
        return super().forward(x)

FACTORS = {}

class ByType(Reading):
    def forward(self, x):
        if type(x) not in FACTORS:
            FACTORS[type(x)] = 3.0
        return super().forward(x) * FACTORS[type(x)]

class Attribute(nn.Module):
    UNREAD = 2.0

    def forward(self, x):
        return x * self.UNREAD

class Growing(Reading):
    def forward(self, x):
        FACTORS[len(FACTORS)] = 3.0
        return super().forward(x) * len(FACTORS)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The user's file, which imports another one."""
    (tmp_path / "settings_of_the_user.py").write_text(SETTINGS)
    (tmp_path / "model_of_the_user.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("settings_of_the_user", "model_of_the_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__("model_of_the_user")


def test_those_of_functions_methods_and_other_files_are_found(model: ModuleType) -> None:
    mine, settings = f"{GLOBALS}model_of_the_user", f"{GLOBALS}settings_of_the_user"
    assert set(globals_read(nn.Sequential(model.Reading()))) == {
        (mine, "DEPTH"),
        (mine, "TABLE"),
        (settings, "scale"),
        (settings, "offset"),
    }
    assert globals_of(settings)["scale"] == 2.0
    assert globals_of(f"{GLOBALS}nowhere") == {}


def test_those_of_a_base_class_are_found(model: ModuleType) -> None:
    both = {name for _, name in globals_read(model.Logging())}
    assert both == {"LOG", "DEPTH", "TABLE", "scale", "offset"}


def test_an_attribute_of_the_same_name_is_none(model: ModuleType) -> None:
    assert not list(globals_read(model.Attribute()))


def test_libraries_have_none() -> None:
    assert not list(globals_read(nn.TransformerEncoderLayer(8, 2)))


def test_what_is_set_between_steps_takes_effect(model: ModuleType) -> None:
    net = model.Reading()
    planned: Any = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)

    def assert_equal() -> Tensor:
        torch.testing.assert_close(planned(BATCH), net(BATCH))
        result: Tensor = planned(BATCH)
        return result

    before = assert_equal()
    model.TABLE["a"] *= 2
    assert not torch.equal(assert_equal(), before)
    before = assert_equal()
    model.settings.offset = 7.0
    assert not torch.equal(assert_equal(), before)


@pytest.mark.parametrize(("kind", "name"), [("Logging", "LOG"), ("Counting", "DEPTH")])
def test_one_that_forward_changes_is_changed_in_each_call(
    model: ModuleType, kind: str, name: str
) -> None:
    net = getattr(model, kind)()
    wanted = [net(BATCH).detach() for _ in range(2)]
    assert getattr(model, name) in ([1, 1], 4)
    setattr(model, name, [] if name == "LOG" else 2)
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1))
    assert getattr(model, name) in ([], 2)
    for each in wanted:
        torch.testing.assert_close(planned(BATCH).detach(), each)
    assert getattr(model, name) in ([1, 1], 4)


def test_a_table_that_the_first_call_fills_is_a_cache(model: ModuleType) -> None:
    net = model.ByType()
    assert sw.capture(net, (BATCH,)).python is None
    planned: Any = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    torch.testing.assert_close(planned(BATCH), net(BATCH))


def test_a_table_that_each_call_fills_is_none(model: ModuleType) -> None:
    assert sw.capture(model.Growing(), (BATCH,)).python is not None


class ByMode(nn.Module):
    """Depends on whether gradients are enabled; `counts` calls in an attribute or not."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.counts, self.calls = nn.Linear(4, 4), counts, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        hidden: Tensor = self.linear(x) + self.calls
        with torch.no_grad():
            scale = 2.0 if torch.is_grad_enabled() else 3.0
        if torch.is_grad_enabled():
            hidden = hidden * scale
        return hidden.square().mean()


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_the_mode_of_gradients_is_that_of_each_call(region: Any, counts: bool) -> None:
    net, eager = ByMode(counts), ByMode(counts)
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1))
    for _ in range(2):
        torch.testing.assert_close(planned(BATCH), eager(BATCH))
        with region():
            torch.testing.assert_close(planned(BATCH), eager(BATCH))

"""Settings of the process that `forward` changes."""

from __future__ import annotations

import decimal
import logging
import sys
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.process_state import SETTINGS, ProcessState, unchanged_process

BATCH = torch.ones(8, 4)


class Net(nn.Module):
    def __init__(self, change: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.change()
        return y.sum() * torch.zeros(()).add(1)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessState]:
    # `torch.testing._internal`, which other tests import, freezes the flags of backends.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    state = ProcessState()
    yield state
    state.restore()


def set_attribute(owner: object, name: str, value: object) -> Callable[[], object]:
    return lambda: setattr(owner, name, value)


REFUSED: dict[str, Callable[[], object]] = {
    "torch.set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.set_default_device": lambda: torch.set_default_device("meta"),
    "torch.set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch.set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "torch.autograd.set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast of cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.backends.cuda.enable_flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "decimal.getcontext()": lambda: setattr(decimal.getcontext(), "prec", 5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_changes_results_is_refused_by_name_and_restored(
    name: str, process: ProcessState
) -> None:
    with pytest.raises(sw.CaptureError, match="changes a setting of the process") as caught:
        sw.capture(Net(REFUSED[name]), (BATCH,))
    message = str(caught.value)
    assert f"`{name}`" in message and "set it before `plan`" in message
    assert [each for each in process.changes() if not each.setting.readers] == []


SILENT: dict[str, Callable[[], object]] = {
    "filters of warnings": lambda: warnings.simplefilter("ignore", UserWarning),
    "the level of a logger": lambda: logging.getLogger("tests.model").setLevel("DEBUG"),
    "errors of NumPy": lambda: np.seterr(divide="ignore"),
    "the limit of recursion": lambda: sys.setrecursionlimit(5000),
    "a benchmark of kernels": set_attribute(torch.backends.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_setting_that_changes_no_result_is_allowed_and_restored(
    name: str, process: ProcessState
) -> None:
    net = Net(SILENT[name])
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    assert [each for each in process.changes() if not each.setting.readers] == []
    torch.testing.assert_close(planned(BATCH), net(BATCH))


def test_a_silent_setting_that_forward_reads_is_refused() -> None:
    class Reader(Net):
        def forward(self, x: Tensor) -> Tensor:
            limit = sys.getrecursionlimit()
            sys.setrecursionlimit(limit + 100)
            return self.linear(x).sum() * limit

    with pytest.raises(sw.CaptureError, match=r"`sys\.setrecursionlimit` \(\d+ to \d+\)"):
        sw.capture(Reader(print), (BATCH,))


def test_a_mode_that_forward_reads_selects_the_program() -> None:
    class Reader(Net):
        def forward(self, x: Tensor) -> Tensor:
            doubled = torch.are_deterministic_algorithms_enabled()
            return self.linear(x).sum() * torch.ones(1 + doubled)

    net = Reader(print)
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    for mode in (False, True, False):
        torch.use_deterministic_algorithms(mode)
        torch.testing.assert_close(planned(BATCH), net(BATCH))
    torch.set_default_dtype(torch.float64)
    assert planned(BATCH).dtype == net(BATCH).dtype == torch.float64


def test_every_setting_is_restored_to_the_value_that_was_read() -> None:
    before = [setting.read() for setting in SETTINGS]
    for setting, value in zip(SETTINGS, before, strict=True):
        if setting.name != "torch.backends.xnnpack.enabled":  # read only
            setting.write(value)
    assert [setting.read() for setting in SETTINGS] == before
    with pytest.raises(sw.CaptureError, match=r"`os\.chdir`"), unchanged_process():
        next(s for s in SETTINGS if s.name == "os.chdir").write("/")


def test_the_default_device_of_the_user_is_restored() -> None:
    torch.set_default_device("meta")
    state = ProcessState()
    torch.set_default_device("cpu")
    state.restore()
    assert torch.ones(1).device.type == "meta"
    torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"

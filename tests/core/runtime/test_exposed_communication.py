"""The seconds that a rank waits for communication."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.core.runtime import accelerator
from shardwright.core.runtime.exposed_communication import WaitTimer
from torchrun import torchrun

CPU = torch.device("cpu")


def test_only_waits_are_counted_and_only_once() -> None:
    waits = WaitTimer()
    with waits.measure():
        assert waits.take_seconds() is None
    with waits.enable(CPU):
        time.sleep(0.2)
        with waits.measure():
            time.sleep(0.05)
            assert waits.exclude(lambda seconds: time.sleep(seconds) or "done")(0.2) == "done"
        seconds = waits.take_seconds()
        assert seconds is not None and 0.05 <= seconds < 0.2
        assert waits.take_seconds() == 0.0
    assert waits.take_seconds() is None


@dataclass
class Mark:
    """An event of an accelerator whose clock is read in milliseconds."""

    device: torch.device
    enable_timing: bool
    at: float | None = None

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, other: Mark) -> float:
        assert self.at is not None and other.at is not None
        return other.at - self.at


def test_an_accelerator_that_is_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Mark] = []
    stream = SimpleNamespace(record_event=recorded.append)
    monkeypatch.setattr(accelerator, "DeviceEvent", Mark)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    waits = WaitTimer()
    with waits.enable(torch.device("cuda")):
        for _ in range(2):
            with waits.measure():
                pass
        assert waits.take_seconds() == 0.0
        for mark, at in zip(recorded, (1000.0, 1250.0), strict=False):
            mark.at = at
        assert waits.take_seconds() == 0.25
        for mark, at in zip(recorded[2:], (2000.0, 4000.0), strict=True):
            mark.at = at
        assert waits.take_seconds() == 2.0


@pytest.mark.distributed
def test_ranks_wait_for_those_that_come_late() -> None:
    output = torchrun(Path(__file__).with_name("exposed_ranks.py"), 2)
    assert output.count("passed ") == 3, output

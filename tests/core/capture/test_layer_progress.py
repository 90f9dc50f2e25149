"""A capture reports the layers that its trace has reached."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.capture import layer_progress
from shardwright.core.capture.capture import capture


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))


def test_layers_are_reported_in_order_of_which_half_the_time_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_progress, "_SECONDS", 0.0)
    net, heard = _layers(), list[tuple[str, int, int]]()
    graph = capture(net, (torch.zeros(2, 8),), on_progress=lambda *told: heard.append(told))
    done = [number for _, number, _ in heard]
    assert done == sorted(set(done)) and max(done) == 11
    assert {(doing, of) for doing, _, of in heard} == {("capture", 2 * 12)}
    assert graph.fingerprint == capture(net, (torch.zeros(2, 8),)).fingerprint


def test_a_short_capture_reports_no_layer() -> None:
    heard = list[tuple[str, int, int]]()
    net, x = _layers(), torch.zeros(2, 8)
    capture(net, (x,))
    capture(net, (x,), on_progress=lambda *told: heard.append(told))
    assert len(heard) <= 1


def test_lines_are_written_while_a_capture_silences_what_others_write(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_progress, "_SECONDS", 0.0)
    with sw.show_progress(True) as on_progress:
        capture(_layers(), (torch.zeros(2, 8),), on_progress=on_progress)
    assert "capture (12 of 24" in capfd.readouterr().err

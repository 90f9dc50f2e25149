"""Graphs of language models that are kept on disk."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardwright.capture.capture import capture
from shardwright.config import graph_cache
from shardwright.config.graph_cache import cached_graph, graphs_folder
from shardwright.config.run import Run
from shardwright.graph.graph import Graph

TINY = Path(__file__).parents[2] / "configs" / "tiny" / "llama2_7b.yaml"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHARDWRIGHT_GRAPH_CACHE", raising=False)


def _small() -> Graph:
    return capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),))


def _never() -> Graph:
    raise AssertionError("captured, although the graph is kept")


def test_a_graph_is_captured_once() -> None:
    first = cached_graph("one", _small)
    again = cached_graph("one", _never)
    assert again.fingerprint == first.fingerprint
    assert again.capture_seconds == first.capture_seconds
    assert [op.target for op in again.ops] == [op.target for op in first.ops]


class Pair(NamedTuple):
    loss: torch.Tensor
    hidden: torch.Tensor


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x.mean(), x)


def test_a_graph_with_a_class_that_no_file_can_name_is_not_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shardwright.capture"):
        assert cached_graph("one", lambda: capture(Named(), (torch.zeros(2, 4),))).outputs
    assert "not cached" in caplog.text


def test_another_description_is_captured_anew() -> None:
    cached_graph("one", _small)
    with pytest.raises(AssertionError, match="captured"):
        cached_graph("two", _never)


def test_a_damaged_file_is_made_anew(caplog: pytest.LogCaptureFixture) -> None:
    cached_graph("one", _small)
    (file,) = graphs_folder().iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "shardwright.capture"):
        cached_graph("one", _small)
    assert "capturing again" in caplog.text
    cached_graph("one", _never)


def test_code_in_a_file_is_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached_graph("one", _small)
    (file,) = graphs_folder().iterdir()
    file.write_bytes(pickle.dumps(Planted(tmp_path / "run")))
    cached_graph("one", _small)
    assert "capturing again" in caplog.text
    assert not (tmp_path / "run").exists()


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_only_this_user_can_write_to_a_new_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        cached_graph("one", _small)
    finally:
        os.umask(before)
    assert graphs_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_not_used(
    mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    cached_graph("one", _small)
    graphs_folder().chmod(mode)
    with pytest.raises(AssertionError, match="captured"):
        cached_graph("one", _never)
    assert f"{graphs_folder()} is not used" in caplog.text
    cached_graph("two", _small)
    assert len(list(graphs_folder().iterdir())) == 1


def test_a_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cached_graph("one", _small)
    monkeypatch.setattr(os, "getuid", lambda: graphs_folder().stat().st_uid + 1)
    with pytest.raises(AssertionError, match="captured"):
        cached_graph("one", _never)


def test_only_the_newest_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_GRAPHS", 2)
    graph = _small()
    for name in ("one", "two", "three"):
        cached_graph(name, lambda: graph)
    assert len(list(graphs_folder().iterdir())) == 2
    cached_graph("three", _never)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_GRAPH_CACHE", "off")
    cached_graph("one", _small)
    assert not graphs_folder().exists()


def test_a_plan_of_a_kept_graph_is_that_of_the_captured_one() -> None:
    first = Run.from_file(TINY).plan(8)
    assert len(list(graphs_folder().iterdir())) == 1
    again = Run.from_file(TINY).plan(8)
    assert len(list(graphs_folder().iterdir())) == 1
    assert again.fingerprint == first.fingerprint
    assert (again.cuts, again.storage, again.bytes) == (first.cuts, first.storage, first.bytes)

"""Graphs of language models that are kept on disk."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from run.config.graph_cache_ranks import CHECKS, TINY
from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.serialize import FORMAT, dumps
from shardwright.run.config import graph_cache
from shardwright.run.config.graph_cache import cached_graph, graphs_folder
from shardwright.run.config.run import Run
from torchrun import checks_on_ranks


@pytest.fixture(scope="module")
def _cache_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All ranks of one launch use one new folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("ranks")))
        patch.delenv("SHARDWRIGHT_GRAPH_CACHE", raising=False)
        yield


test_two_ranks_train_alike_whatever_happened_to_the_cache = pytest.mark.usefixtures(
    "_cache_of_ranks"
)(checks_on_ranks(CHECKS, 2))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHARDWRIGHT_GRAPH_CACHE", raising=False)


def _small() -> Graph:
    return capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),))


def _never() -> Graph:
    raise AssertionError("captured, although the graph is kept")


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "shardwright.capture"
    return [each.message for each in caplog.records if each.name == name]


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


def test_a_graph_with_a_class_that_a_module_names_is_kept() -> None:
    assert cached_graph("one", lambda: capture(Named(), (torch.zeros(2, 4),))).outputs
    assert len(cached_graph("one", _never).outputs) == 2


def test_another_description_is_captured_anew() -> None:
    cached_graph("one", _small)
    with pytest.raises(AssertionError, match="captured"):
        cached_graph("two", _never)


def _flipped(content: bytes) -> bytes:
    """One bit, which makes another number of the last one."""
    place = max(content.rindex(str(digit).encode()) for digit in range(10))
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": _flipped,
    "the end is missing": lambda content: content[:-100],
    "empty": lambda content: b"",
    "foreign": lambda content: b"{}",
    "zeros": lambda content: bytes(len(content)),
    "without a checksum": lambda content: content.partition(b"\n")[2],
    "another format": lambda content: content.replace(b"format %d," % FORMAT, b"format 0,"),
    "of another key": lambda content: dumps(_small(), "another"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_one_warning_and_made_anew(
    damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cached_graph("one", _small)
    (file,) = graphs_folder().iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING, "shardwright.capture"):
        again = cached_graph("one", _small)
    assert again.fingerprint == _small().fingerprint
    (line,) = _warnings(caplog)
    assert "is damaged, so the model is captured again" in line
    assert "\n" not in line
    assert cached_graph("one", _never).fingerprint == again.fingerprint
    assert list(graphs_folder().iterdir()) == [file]


def _as_a_file() -> None:
    graphs_folder().parent.mkdir(parents=True)
    graphs_folder().write_text("")


def _as_a_folder_in_place_of_the_graph() -> None:
    cached_graph("one", _small)
    (file,) = graphs_folder().iterdir()
    file.unlink()
    file.mkdir()


def _as_a_loop() -> None:
    graphs_folder().parent.mkdir(parents=True)
    graphs_folder().symlink_to(graphs_folder())


@pytest.mark.parametrize("obstacle", [_as_a_file, _as_a_folder_in_place_of_the_graph, _as_a_loop])
def test_a_cache_that_cannot_be_used_is_one_warning(
    obstacle: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    obstacle()
    with caplog.at_level(logging.WARNING, "shardwright.capture"):
        graph = cached_graph("one", _small)
    assert graph.fingerprint == _small().fingerprint
    (line,) = _warnings(caplog)
    assert "not cached" in line


def test_a_user_without_a_home_folder_has_no_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert cached_graph("one", _small).fingerprint == _small().fingerprint
    (line,) = _warnings(caplog)
    assert "not cached" in line


def test_a_file_that_cannot_be_written_is_not_left_half_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert cached_graph("one", _small).fingerprint == _small().fingerprint
    assert "No space left" in caplog.text
    assert not list(graphs_folder().iterdir())


@pytest.mark.parametrize(
    "change", ["torch", "commit", "python", "transformers", "source", "format"]
)
def test_a_graph_of_another_version_is_captured_anew(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_graph("one", _small)
    changes: dict[str, tuple[object, str, object]] = {
        "torch": (torch, "__version__", "2.99.0"),
        "commit": (torch.version, "git_version", "0"),
        "python": (graph_cache.platform, "python_version", lambda: "3.99.0"),
        "transformers": (graph_cache, "version", lambda package: f"{package} 99"),
        "source": (graph_cache, "_hash_source_files", lambda: "changed"),
        "format": (graph_cache, "FORMAT", 99),
    }
    monkeypatch.setattr(*changes[change])
    with pytest.raises(AssertionError, match="captured"):
        cached_graph("one", _never)


def test_a_change_of_a_capture_pass_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "shardwright"
    for name in ("run/config/graph_cache.py", "core/capture/views.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("one = 1")
    monkeypatch.setattr(graph_cache, "__file__", str(root / "run/config/graph_cache.py"))
    before = graph_cache._hash_source_files.__wrapped__()
    (root / "core/capture/views.py").write_text("one = 2")
    assert graph_cache._hash_source_files.__wrapped__() != before


def test_processes_that_write_at_once_leave_one_whole_file() -> None:
    graph = _small()
    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(cached_graph, "one", lambda: graph) for _ in range(32)]:
            assert each.result().fingerprint == graph.fingerprint
    assert len(list(graphs_folder().iterdir())) == 1
    cached_graph("one", _never)


def test_code_in_a_file_is_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached_graph("one", _small)
    (file,) = graphs_folder().iterdir()
    file.write_bytes(pickle.dumps(Planted(tmp_path / "run")))
    cached_graph("one", _small)
    assert "is captured again" in caplog.text
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
    assert f"{graphs_folder()} is ignored" in caplog.text
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


def test_other_files_in_its_folder_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MAX_GRAPHS", 1)
    graph = _small()
    cached_graph("one", lambda: graph)
    for name in ("thesis.tex", "left.graph.partial"):
        (graphs_folder() / name).touch()
    os.utime(graphs_folder() / "thesis.tex", (0, 0))
    os.utime(graphs_folder() / "left.graph.partial", (0, 0))
    cached_graph("two", lambda: graph)
    assert (graphs_folder() / "thesis.tex").exists()
    assert len(list(graphs_folder().iterdir())) == 2


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

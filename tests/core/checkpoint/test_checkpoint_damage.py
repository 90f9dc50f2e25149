"""Checkpoints that are damaged, or planted: refused by the file's name, and no code is run."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.bit_flips import REFUSED, flip_bits
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import shardwright as sw
from random_cases import first_seed
from shardwright.core.checkpoint.manifest import (
    INFO_FILE,
    VERSION,
    CheckpointInfo,
    CheckpointWarning,
)
from shardwright.core.checkpoint.storage import CheckpointReader, _covers_tensor
from shardwright.errors import DamagedCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FILES = (".metadata", "__0_0.distcp", INFO_FILE)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def save(folder: Path, *steps: int) -> nn.Module:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for step in steps:
        with torch.no_grad():
            net[0].bias.fill_(step)
        sw.save_checkpoint(folder, net, optimizer, position=sw.Position(step))
    return net


def flip(path: Path, byte: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


@pytest.mark.random
def test_every_changed_bit_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    net = save(tmp_path, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    ends = flip_bits(
        tmp_path / "step-1",
        lambda: sw.load_checkpoint(tmp_path, net, optimizer),
        flips=45,
        seed=first_seed(),
    )
    assert ends == {REFUSED: 45}


@pytest.mark.parametrize("bits", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_no_bit_of_the_manifest_can_change(tmp_path: Path, bits: int) -> None:
    """One of nine: another one of each byte and the next."""
    save(tmp_path, 1)
    path = tmp_path / "step-1" / INFO_FILE
    content = path.read_bytes()
    for number in range(0, 8 * len(content), bits):
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match=INFO_FILE):
            CheckpointInfo.read(path.parent)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("fault", ["missing", "truncated", "empty", "longer", "unreadable"])
def test_a_file_that_is_not_as_it_was_written_is_named(
    tmp_path: Path, file: str, fault: str
) -> None:
    net = save(tmp_path, 1)
    path = tmp_path / "step-1" / file
    content = path.read_bytes()
    path.unlink()
    if fault == "unreadable":
        path.mkdir()
    elif fault != "missing":
        cut = {"truncated": content[:-1], "empty": b"", "longer": content + b"\0"}
        path.write_bytes(cut[fault])
    with pytest.raises(DamagedCheckpointError, match=f"step-1/{file} is (missing|damaged)"):
        sw.load_checkpoint(tmp_path, net, step=1)


@pytest.mark.parametrize("file", FILES)
def test_the_newest_intact_checkpoint_is_loaded_with_a_warning_that_names_both(
    tmp_path: Path, file: str
) -> None:
    net = save(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-3" / file)
    (tmp_path / "step-2" / file).unlink()
    named = rf"step-3/{file} is damaged.*step-2/{file} is missing: .*step-1 is used instead"
    with pytest.warns(CheckpointWarning, match=named) as warned:
        assert sw.load_checkpoint(tmp_path, net).step == 1
    # At the user's call, not in the code that loads.
    own = [each for each in warned if each.category is CheckpointWarning]
    assert {each.filename for each in own} == {__file__}
    assert net[0].bias.tolist() == [1.0] * 4


def test_an_intact_checkpoint_is_loaded_without_a_warning(tmp_path: Path) -> None:
    net = save(tmp_path, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        sw.load_checkpoint(tmp_path, net)


def test_nothing_is_loaded_where_all_are_damaged(tmp_path: Path) -> None:
    net = save(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step-{step}" / "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError, match=r"step-2/__0_0.*step-1/__0_0"):
        sw.load_checkpoint(tmp_path, net)


def test_a_damaged_later_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    net = save(tmp_path, 10, 30)
    flip(tmp_path / "step-30" / ".metadata")
    for step in (20, 21):
        sw.save_checkpoint(tmp_path, net, position=sw.Position(step), keep=1)
    with pytest.warns(CheckpointWarning):
        assert sw.load_checkpoint(tmp_path, net).step == 21


def forget_checksums(folder: Path) -> None:
    """Makes a checkpoint of version 1 of one of version 2."""
    about = CheckpointInfo.read(folder)
    kept = ("position", "groups", "random", "fingerprint", "devices")
    content: dict[str, Any] = {name: getattr(about, name) for name in kept}
    position = {name: getattr(about.position, name) for name in ("step", "epoch", "batch")}
    (folder / INFO_FILE).write_text(json.dumps({"version": 1, **content, "position": position}))


def test_a_checkpoint_without_checksums_is_loaded_with_a_warning(tmp_path: Path) -> None:
    net = save(tmp_path, 1)
    forget_checksums(tmp_path / "step-1")
    with pytest.warns(CheckpointWarning, match="step-1 has no checksums"):
        assert sw.load_checkpoint(tmp_path, net, torch.optim.AdamW(net.parameters())).step == 1
    assert CheckpointInfo.read(tmp_path / "step-1").files == {}
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(sw.CheckpointError, match="saved with another optimizer"),
    ):
        sw.load_checkpoint(tmp_path, net, torch.optim.SGD(net.parameters()))
    assert VERSION == 2


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_code_in_the_metadata_is_refused_by_its_name_and_not_run(tmp_path: Path) -> None:
    net = save(tmp_path, 1)
    forget_checksums(tmp_path / "step-1")
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "run")))
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(sw.CheckpointError, match=r"step-1/\.metadata .* refers to posix\.mkdir"),
    ):
        sw.load_checkpoint(tmp_path, net)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", pickle.dumps(7), pickle.dumps(torch.Size([1])), b"\x80\x05."]
)
def test_metadata_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata cannot be read"):
        CheckpointReader(tmp_path).read_metadata()


def test_code_in_an_entry_that_is_not_a_tensor_is_not_run(tmp_path: Path) -> None:
    net = save(tmp_path, 1)
    folder = tmp_path / "step-1"
    state = {f"model.{name}": value for name, value in net.state_dict().items()}
    planted = {**state, "model.0.weight": Planted(tmp_path / "run")}
    state_dict_saver.save(planted, storage_writer=FileSystemWriter(folder), no_dist=True)
    forget_checksums(folder)
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(sw.CheckpointError, match=r"the model has '0\.weight', the checkpoint does"),
    ):
        sw.load_checkpoint(tmp_path, net)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("chunks", "covers"),
    [
        ([(0, 0, 2, 3), (2, 0, 3, 3), (0, 3, 2, 1), (2, 3, 3, 1)], True),
        ([(0, 0, 5, 4), (5, 0, 0, 4)], True),
        ([(0, 0, 2, 3), (2, 0, 3, 3), (0, 3, 2, 1)], False),
        ([(0, 0, 5, 2), (0, 1, 5, 2)], False),
        ([(0, 0, 5, 4), (0, 0, 5, 4)], False),
        ([], False),
    ],
)
def test_chunks_that_leave_elements_out_or_repeat_them_are_noticed(
    chunks: list[tuple[int, int, int, int]], covers: bool
) -> None:
    """Each chunk: its offsets and its sizes; the second case has the empty shard of a rank."""
    boxes = [SimpleNamespace(offsets=chunk[:2], sizes=chunk[2:]) for chunk in chunks]
    assert _covers_tensor(SimpleNamespace(chunks=boxes, size=(5, 4))) == covers

"""Whole models as one file, on one device; `test_checkpoint.py` does it on four."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwright as sw
from core.checkpoint.checkpoint_ranks import model
from shardwright.core.checkpoint.state_dict_file import _remove_shards
from shardwright.errors import CheckpointError


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt", "net.pth", "net.bin"])
def test_a_file_brings_a_model_back(tmp_path: Path, name: str) -> None:
    net, other = model(0), model(1)
    sw.save_state_dict(net, tmp_path / "new" / name)
    sw.load_state_dict(other, tmp_path / "new" / name)
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)
    assert other.head.weight is other.embedding.weight
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


def test_any_name_of_a_tied_parameter_will_do(tmp_path: Path) -> None:
    net, other = model(0), model(1)
    state = {n: v.clone() for n, v in net.state_dict().items() if n != "embedding.weight"}
    safetensors.torch.save_file(state, tmp_path / "net.safetensors")
    sw.load_state_dict(other, tmp_path / "net.safetensors")
    assert torch.equal(other.embedding.weight, net.embedding.weight)


def test_a_folder_of_several_files_is_read_as_one(tmp_path: Path) -> None:
    net, other = nn.Linear(2, 3), nn.Linear(2, 3)
    for name, value in net.state_dict().items():
        safetensors.torch.save_file({name: value}, tmp_path / f"{name}.safetensors")
    sw.load_state_dict(other, tmp_path)
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)


def test_only_shards_are_removed_before_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    own, other, link = (tmp_path / name for name in ("own", "other", "link"))
    for folder in (own, other):
        folder.mkdir()
        for name in ("__0_0.distcp", "__11_0.distcp", ".metadata", "head.weight.full"):
            (folder / name).touch()
    (other / "notes.txt").write_text("kept")
    link.symlink_to(own)
    for folder, named in ((other, other / "notes.txt"), (link, link)):
        with pytest.raises(CheckpointError, match=rf"^{named} already exists"):
            _remove_shards(folder)
    assert len(list(other.iterdir())) == 5 and len(list(own.iterdir())) == 4
    _remove_shards(own)
    assert not own.exists()
    _remove_shards(own)


def test_another_model_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    net, other = nn.Linear(2, 3), nn.Linear(2, 4)
    sw.save_state_dict(net, tmp_path / "net.pt")
    before = other.weight.detach().clone()
    with pytest.raises(sw.CheckpointError, match=r"'weight' has shape \(3, 2\) in .*, \(4, 2\)"):
        sw.load_state_dict(other, tmp_path / "net.pt")
    assert torch.equal(other.weight, before)


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    with pytest.raises(
        sw.CheckpointError,
        match=r"net\.h5: unknown suffix '.h5'\nuse a path that ends in \.safetensors or \.pt",
    ):
        sw.save_state_dict(net, tmp_path / "net.h5")
    with pytest.raises(sw.CheckpointError, match="no such file"):
        sw.load_state_dict(net, tmp_path / "net.pt")
    with pytest.raises(sw.CheckpointError, match="no such file"):
        sw.load_state_dict(net, tmp_path)
    torch.save({"weight": 1}, tmp_path / "net.pt")
    with pytest.raises(sw.CheckpointError, match="not a state_dict"):
        sw.load_state_dict(net, tmp_path / "net.pt")


@pytest.mark.parametrize("name", ["x" * 300, "../net.safetensors", 3, ["a"], "a\0b"])
def test_an_index_with_other_things_than_names_of_files_is_refused(
    tmp_path: Path, name: object
) -> None:
    net = nn.Linear(2, 3)
    sw.save_state_dict(net, tmp_path / "net.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json: .*\ndownload it again"):
        sw.load_state_dict(net, tmp_path)


def test_a_series_of_any_length_is_missing_its_first_absent_file(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    sw.save_state_dict(net, tmp_path / f"net-00001-of-{10**50}.safetensors")
    with pytest.raises(CheckpointError, match=r"net-00002-of-10+\.safetensors is missing"):
        sw.load_state_dict(net, tmp_path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_a_path_that_the_file_system_cannot_encode_is_refused(
    tmp_path: Path, name: str, suffix: str
) -> None:
    with pytest.raises(sw.CheckpointError, match="not a path: it has control characters"):
        sw.save_state_dict(nn.Linear(2, 2), tmp_path / f"{name}{suffix}")
    with pytest.raises(sw.CheckpointError, match="tmp"):
        sw.load_state_dict(nn.Linear(2, 2), tmp_path / f"{name}{suffix}")
    assert not list(tmp_path.iterdir())

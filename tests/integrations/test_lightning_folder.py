"""Folders in Lightning's format that cannot be written or read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from features.full_disk_ranks import contents, no_file_above
from shardwright.errors import CheckpointError
from shardwright.integrations.lightning_folder import load_folder, save_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("limit", [1000, 20_000], ids=["tensors", "other entries"])
def test_a_failed_write_leaves_the_earlier_checkpoint(limit: int, tmp_path: Path) -> None:
    folder, net = tmp_path / "last.ckpt", nn.Linear(16, 16)
    wanted = net.weight.detach().clone()
    save_folder(folder, net, "model", {}, {"epoch": 1})
    before = contents(tmp_path)
    with no_file_above(limit), pytest.raises(CheckpointError, match=r"last\.ckpt.*File too large"):
        save_folder(folder, net, "model", {}, {"more": torch.zeros(10_000)})
    assert before.items() <= contents(tmp_path).items()
    nn.init.zeros_(net.weight)
    assert load_folder(folder, net, "model", {})["epoch"] == 1
    assert torch.equal(net.weight, wanted)
    save_folder(folder, net, "model", {}, {"epoch": 2})
    assert load_folder(folder, net, "model", {})["epoch"] == 2
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("name", ["meta.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [None, b"", b"text"], ids=["missing", "empty", "text"])
def test_a_damaged_file_is_one_error(name: str, content: bytes | None, tmp_path: Path) -> None:
    folder, net = tmp_path / "last.ckpt", nn.Linear(16, 16)
    save_folder(folder, net, "model", {}, {})
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"last\.ckpt"):
        load_folder(folder, net, "model", {})

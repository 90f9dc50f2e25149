"""Weights that a run begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.checkpoint.position import Position
from shardwright.errors import CheckpointError
from shardwright.run.loop.weights import load_weights


def net(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt", "."])
def test_a_file_or_a_folder_of_files_is_loaded(tmp_path: Path, name: str) -> None:
    file = tmp_path / ("net.safetensors" if name == "." else name)
    sw.save_state_dict(net(1), file)
    loaded = net(2)
    load_weights(loaded, tmp_path / name)
    assert torch.equal(loaded.weight, net(1).weight)


def test_of_checkpoints_the_newest_is_loaded_or_the_one_that_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        at = Position(epoch=0, batch=step, step=step)
        sw.save_checkpoint(tmp_path, net(step), position=at)
    for path, seed in ((tmp_path, 2), (tmp_path / "step-1", 1)):
        loaded = net(3)
        load_weights(loaded, path)
        assert torch.equal(loaded.weight, net(seed).weight)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        load_weights(net(1), tmp_path)

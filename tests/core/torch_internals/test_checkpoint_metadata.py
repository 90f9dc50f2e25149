"""Metadata from strangers, read as data."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from benchmarks.bit_flips import REFUSED
from benchmarks.strangers import ATTACKS, METADATA, attack

import shardwright as sw
from shardwright.core.torch_internals.checkpoint_metadata import loads_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("name", ATTACKS)
def test_checkpoints_of_strangers_are_refused_and_change_nothing(name: str, tmp_path: Path) -> None:
    assert attack(name, tmp_path / "run") == REFUSED


def test_tensors_are_those_that_dcp_reads(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    sw.save_checkpoint(tmp_path, net, position=sw.Position(1))
    content = (tmp_path / "step-1" / METADATA).read_bytes()
    ours, theirs = loads_metadata(content), pickle.loads(content)
    assert ours.storage_data == theirs.storage_data
    for key, entry in theirs.state_dict_metadata.items():
        own = ours.state_dict_metadata[key]
        assert (own.size, own.chunks) == (entry.size, entry.chunks)
        assert own.properties.dtype == entry.properties.dtype

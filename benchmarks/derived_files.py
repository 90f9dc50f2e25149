"""Files that are derived from others, in which one bit was changed: who notices."""

from __future__ import annotations

import random
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shardwright as sw
from benchmarks.bit_flips import RAW, REFUSED, SILENT
from shardwright.core.checkpoint.file_checksum import write_checksum
from shardwright.core.cost.cluster_file import cluster_file_text
from shardwright.core.cost.clusters import load_cluster
from shardwright.plain_data import EditedFileWarning
from shardwright.run.data.token_files import MEGATRON_HEADER, token_sequences, write_tokens

WARNED, SAME = "warned", "same content"


def flip_derived_files(folder: Path, flips: int, seed: int = 0) -> Mapping[str, Counter[str]]:
    """How often reading ends in which way after a random bit of a file was changed, by its kind."""
    draw = random.Random(seed)
    return {
        kind: Counter(_flip(path, read, draw) for _ in range(flips))
        for kind, (path, read) in _files(folder).items()
    }


def _files(folder: Path) -> Mapping[str, tuple[Path, Callable[[], Any]]]:
    """Of each kind a file, and what reads it."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    plan, calibration = folder / "plan.json", folder / "local.yaml"
    sw.plan(net, (torch.randn(8, 8),), devices=2, cluster="h100").save(plan)
    calibration.write_text(cluster_file_text(load_cluster("h100")))
    tokens, weights = folder / "tokens.bin", folder / "model.safetensors"
    write_tokens(tokens, np.arange(4096, dtype=np.uint16))
    sw.save_state_dict(net, weights)
    write_checksum(weights)

    def read_weights() -> list[Any]:
        other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        sw.load_state_dict(other, weights)
        return [parameter.tolist() for parameter in other.parameters()]

    def read_tokens() -> list[Any]:
        sequences, _ = token_sequences(tokens, 64)
        return [each.tolist() for each in sequences[torch.arange(len(sequences))]]

    def read_megatron() -> list[Any]:
        sequences, _ = token_sequences(folder / "megatron.bin", 64)
        return [each.tolist() for each in sequences[torch.arange(len(sequences))]]

    return {
        "plan": (plan, lambda: sw.Plan.load(plan).to_json()),
        "calibration": (calibration, lambda: repr(load_cluster(calibration))),
        "weights of save_pretrained": (weights, read_weights),
        "tokens": (tokens, read_tokens),
        "index of Megatron-LM's tokens": (_write_megatron(folder), read_megatron),
        "checksums of tokens": (tokens.with_name("tokens.bin.checksum"), read_tokens),
    }


def _write_megatron(folder: Path) -> Path:
    """Write a dataset of Megatron-LM with two documents; its index."""
    (folder / "megatron.bin").write_bytes(np.arange(4096, dtype=np.int32).tobytes())
    index = folder / "megatron.idx"
    header = MEGATRON_HEADER.pack(b"MMIDIDX\0\0", 1, 4, 2, 3)
    index.write_bytes(header + struct.pack("<2i2q3q", 1096, 3000, 0, 4 * 1096, 0, 1, 2))
    return index


def _flip(path: Path, read: Callable[[], Any], draw: random.Random) -> str:
    content, expected = path.read_bytes(), read()
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    path.write_bytes(changed)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = read()
        if any(issubclass(warning.category, EditedFileWarning) for warning in caught):
            return WARNED
        return SAME if got == expected else SILENT
    except sw.ShardwrightError as error:
        return REFUSED if path.name in str(error) or path.stem in str(error) else RAW
    except Exception:
        return RAW
    finally:
        path.write_bytes(content)

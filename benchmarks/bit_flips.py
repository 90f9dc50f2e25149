"""Loads checkpoints in which one bit was changed, and counts how that ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import shardwright as sw

REFUSED, SILENT, RAW = "refused by name", "loaded silently", "raw error"


def flip_bits(folder: Path, load: Callable[[], object], flips: int, seed: int = 0) -> Counter[str]:
    """How often `load` ended in which way when a random bit of a random file in `folder` was
    changed. Files take turns, so that small ones are hit as often as large ones."""
    draw, files = random.Random(seed), sorted(path for path in folder.iterdir() if path.is_file())
    files = [path for path in files if path.stat().st_size]
    outcomes: Counter[str] = Counter()
    for number in range(flips):
        path = files[number % len(files)]
        content = path.read_bytes()
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        outcomes[_outcome(path, load)] += 1
        path.write_bytes(content)
    return outcomes


def _outcome(path: Path, load: Callable[[], object]) -> str:
    try:
        load()
    except sw.CheckpointError as error:
        return REFUSED if str(path) in str(error) else RAW
    except Exception:
        return RAW
    return SILENT

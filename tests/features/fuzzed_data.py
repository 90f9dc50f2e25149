"""Data and records that commands read or write, mutated as in `fuzzed_files`.

`python -m features.fuzzed_data KIND FIRST COUNT` prints the counts as JSON.
"""

from __future__ import annotations

import gzip
import io
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardwright as sw
from features.fuzzed_files import Fuzzed, main_of, plan_examples
from mutations import json_text
from shardwright.core.cost.collective_totals import CollectiveTotal
from shardwright.core.plan.measured import Measured, MeasuredRank
from shardwright.run.data.data import IMAGES_FILE, LABELS_FILE, mnist
from shardwright.run.data.token_files import token_sequences, write_tokens
from shardwright.run.launch.rank_failure import RankError
from shardwright.run.loop.step_log import StepRecord, open_step_log
from shardwright.tools.compare.published_rows import read_published


def _idx(*shape: int) -> bytes:
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    return header + bytes(index % 256 for index in range(int(np.prod(shape))))


def _read_images(path: Path, suffix: str = "") -> None:
    folder = path.with_name("mnist")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(path, folder / f"{IMAGES_FILE}{suffix}")
    (folder / LABELS_FILE).write_bytes(_idx(5))
    images, labels = mnist(folder)
    assert len(images) == len(labels) == 5


def _profile_examples() -> tuple[str, ...]:
    collective = CollectiveTotal("all_reduce", "dp", 2.0, 1024.0, 1e-4)
    ranks = tuple(
        MeasuredRank(rank, 0, 0.1, {"matrix products": 0.05}, (collective,), 2**20)
        for rank in range(2)
    )
    path = Path("example_profile.json")
    fingerprint = sw.Plan.from_json(plan_examples()[1]).fingerprint
    Measured(fingerprint, "cpu", 3, ranks, ((collective,),)).save(path)
    return (path.read_text(),)


def _read_profile(path: Path) -> None:
    Path("two.json").write_text(plan_examples()[1])
    sw.Plan.load("two.json").report(path.with_suffix(".html"), measured=Measured.load(path))


def _step_examples() -> tuple[str, ...]:
    steps = (StepRecord(epoch, step, 0.5, 10.0, 0.4) for epoch in range(2) for step in range(3))
    return ("".join(f"{step.to_json()}\n" for step in steps),)


def _read_steps(path: Path) -> None:
    with open_step_log(path, sw.Position(4, 1, 1)) as file:
        file.write(StepRecord(1, 1, 0.5, 10.0).to_json() + "\n")


def _run_examples() -> tuple[str, ...]:
    row: dict[str, Any] = {
        "id": "a",
        "source": "b",
        "model": "c",
        "family": "llama",
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 128,
        "vocab": 320,
        "seq": 64,
        "hardware": "h100",
        "devices": 8,
        "data_parallel": 8,
        "tensor_parallel": 1,
        "stages": 1,
        "sequence_parallel": False,
        "sharded": "none",
        "micro_batch": 1,
        "global_batch": 8,
        "recompute": "none",
        "dtype": "bf16",
        "tokens_per_second_per_device": 1000.0,
    }
    return (json_text({"rows": [row]}),)


def _token_examples() -> tuple[bytes, ...]:
    path = Path("example_tokens.bin")
    write_tokens(path, np.arange(256, dtype=np.uint16))
    array = io.BytesIO()
    np.save(array, np.arange(256, dtype=np.uint32))
    return (path.read_bytes(), array.getvalue())


def _read_tokens(path: Path) -> None:
    named = path.with_suffix(".npy" if path.read_bytes()[:6] == b"\x93NUMPY" else ".bin")
    shutil.copy(path, named)
    inputs, labels = token_sequences(named, 16, vocab_size=320)
    rows = torch.arange(len(inputs))
    assert inputs[rows].shape == labels[rows].shape


def _error_examples() -> tuple[str, ...]:
    extra = {"py_callstack": "Traceback\nValueError: x", "timestamp": "1"}
    return (json_text({"message": {"message": "ValueError: x", "extraInfo": extra}}),)


def _read_error(path: Path) -> None:
    error = RankError.read(path)
    assert error is None or isinstance(str(error.stop), str)


KINDS: Mapping[str, Fuzzed] = {
    "images": Fuzzed("idx", json_text, lambda: (_idx(5, 4, 3),), _read_images),
    "gzipped images": Fuzzed(
        "gz",
        json_text,
        lambda: (gzip.compress(_idx(5, 4, 3), mtime=0),),
        lambda path: _read_images(path, ".gz"),
    ),
    "profile": Fuzzed("json", json_text, _profile_examples, _read_profile),
    "step log": Fuzzed("jsonl", json_text, _step_examples, _read_steps),
    "runs": Fuzzed("json", json_text, _run_examples, lambda path: _each(read_published, path)),
    "tokens": Fuzzed("data", json_text, _token_examples, _read_tokens),
    "error": Fuzzed("json", json_text, _error_examples, _read_error),
}


def _each(read: Callable[[Path], list[Any]], path: Path) -> None:
    assert all(map(repr, read(path)))


if __name__ == "__main__":
    main_of(KINDS, *sys.argv[1:])

"""Whole batches of tokens, read by every rank

`shardwright train` gives each rank whole batches, of which it keeps its part. LLaMA 2 7B from
`configs/llama2_7b_auto.yaml`, with the same batch on any number of devices: the CPU seconds in
which a rank reads it from a file of 67 M tokens of 16 bits that is in the page cache, the least of
five, and its share of the step that is predicted for the plan. Goal: under 5% of a step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds
from shardwright.run.config.run import Run
from shardwright.run.data.data import Batches
from shardwright.run.data.token_files import token_sequences

DEVICES = (64, 1024)
TOKENS, VOCABULARY = 1 << 26, 32_000
TIMES, MOST = 5, 0.05


def run(size: Size = Size.DEFAULT) -> list[Table]:
    head = ("devices", "tokens of a batch", "read, s", "M tokens a second", "step, s", "share")
    table = Table("Reading a batch", head)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.bin"
        numbers = np.random.default_rng(0)
        numbers.integers(0, VOCABULARY, TOKENS, dtype=np.uint16).tofile(file)
        for devices in size.of(DEVICES[:1], full=DEVICES):
            planned = Run.from_file(ROOT / "configs" / "llama2_7b_auto.yaml").for_devices(devices)
            step, data = planned.plan(devices).step, planned.config.data
            assert step is not None and data.seq_length is not None
            tokens = data.batch_size * data.seq_length
            read = seconds(file, data.batch_size, data.seq_length)
            share = read / step.seconds
            numbers_of_row = (f"{read:.3f}", f"{tokens / read / 1e6:.0f}", f"{step.seconds:.2f}")
            table.add(devices, f"{tokens:,}", *numbers_of_row, f"{share:.1%}")
            if share > MOST:
                table.missed.append(f"{devices} devices: {share:.1%} of a step")
    return [table]


def seconds(file: Path, batch_size: int, length: int) -> float:
    """CPU seconds to read a batch of sequences of `length` tokens."""
    batches = Batches(token_sequences(file, length, VOCABULARY), batch_size).epoch(0)
    return min(cpu_seconds(lambda: next(batches)) for _ in range(TIMES))

"""How large what is measured is: for an accelerator, and for a try on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.one_gpu.llama import LlamaSizes


@dataclass(frozen=True)
class Sizes:
    """
    Args:
        matrices: rows, columns and inner dimension of products.
        dtypes: in which they are computed.
        sequences: of attention, with the heads of `block`.
        elements: of what only reads and writes.
        block: one layer, whose program is compared with the module.
        batch, sequence: of the block.
        rounds: in which they run in turn.
        model: whose memory is predicted and measured.
        model_batch, model_sequence: of the whole batch on all devices.
        message: elements of each collective.
        repeats: of each measurement of a rate.
        calls: one after another in a measurement, so that launches overlap computation.
        steps: models whose training steps are predicted, each with batch and positions.
    """

    matrices: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    sequences: tuple[int, ...]
    elements: int
    block: LlamaSizes
    batch: int
    sequence: int
    rounds: int
    model: LlamaSizes
    model_batch: int
    model_sequence: int
    message: int
    repeats: int
    calls: int
    steps: tuple[tuple[LlamaSizes, int, int], ...]


FULL = Sizes(
    matrices=(
        *((n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384)),
        *((tokens, 4096, 4096) for tokens in (512, 4096, 16384)),
        *((tokens, 11008, 4096) for tokens in (512, 4096, 16384)),
        *((tokens, 4096, 11008) for tokens in (512, 4096, 16384)),
        *((16384, 1024, 4096), (16384, 4096, 1376), (4096, 32000, 4096)),
    ),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    sequences=(512, 1024, 2048, 4096, 8192, 16384),
    elements=1 << 28,
    block=LlamaSizes(width=4096, inner=11008, heads=32),
    batch=4,
    sequence=2048,
    rounds=30,
    model=LlamaSizes(width=2048, inner=5504, heads=16, layers=4, vocabulary=32000),
    model_batch=32,
    model_sequence=1024,
    message=1 << 26,
    repeats=10,
    calls=5,
    steps=(
        (LlamaSizes(width=4096, inner=11008, heads=32, layers=4, vocabulary=32000), 4, 2048),
        (LlamaSizes(width=4096, inner=11008, heads=32, layers=2, vocabulary=32000), 1, 16384),
        (LlamaSizes(width=8192, inner=28672, heads=64, layers=1, vocabulary=32000), 1, 4096),
        (LlamaSizes(width=2048, inner=5504, heads=16, layers=8, vocabulary=32000), 8, 1024),
        (LlamaSizes(width=2048, inner=5504, heads=16, layers=8, vocabulary=50257), 8, 1024),
    ),
)
TINY = Sizes(
    matrices=((64, 64, 64), (32, 128, 64)),
    dtypes=(torch.bfloat16, torch.float32),
    sequences=(32, 64),
    elements=1 << 12,
    block=LlamaSizes(width=64, inner=128, heads=4),
    batch=2,
    sequence=16,
    rounds=4,
    model=LlamaSizes(width=32, inner=64, heads=8, layers=4, vocabulary=128),
    model_batch=32,
    model_sequence=16,
    message=1 << 10,
    repeats=2,
    calls=2,
    steps=((LlamaSizes(width=32, inner=64, heads=8, layers=2, vocabulary=128), 2, 16),),
)

"""What `test_full_tensors.py` runs on each of four ranks."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh

from shardwright.core.runtime.full_tensors import compute_on_full_tensors

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchrun import run_checks

REDUCTIONS = ("sum", "avg", "product", "max", "min")
PLACEMENTS: tuple[Placement, ...] = (*map(Partial, REDUCTIONS), Replicate(), Shard(0))


def a_value_written_into_partial_terms_is_the_value_of_their_reduction() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.tensor([[-3.0, 5.0], [2.0, -7.0], [0.5, 4.0], [-1.0, -2.0]])
    for placements in product(PLACEMENTS, repeat=2):
        # DTensor has no partial placements of several reductions.
        if len({each for each in placements if isinstance(each, Partial)}) > 1:
            continue
        shards = sum(isinstance(placement, Shard) for placement in placements)
        local = torch.zeros(len(full) // 2**shards, 2)
        written = DTensor.from_local(local, mesh, placements, run_check=False)
        compute_on_full_tensors(torch.ops.aten.copy_.default, (written, full), {})
        torch.testing.assert_close(written.full_tensor(), full, msg=str(placements))


CHECKS = [a_value_written_into_partial_terms_is_the_value_of_their_reduction]

if __name__ == "__main__":
    run_checks(CHECKS)

"""`torch.optim.Muon` on four ranks, with matrices sharded in all ways, and on one device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh

from shardwright.core.runtime.dtensor import local_part_of
from shardwright.core.runtime.muon import orthogonalize_full_matrices
from shardwright.core.torch_internals.distributed import group_timeout
from shardwright.core.torch_internals.dtensor import StridedShard

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchrun import run_checks

STEPS = 3
SHAPES = ((16, 8), (8, 24), (12, 12), (4, 4), (32, 8), (8, 24))
PLACEMENTS: tuple[tuple[Placement, ...], ...] = (
    *product((Replicate(), Shard(0), Shard(1)), repeat=2),
    (StridedShard(0, split_factor=2), Shard(0)),
)


def matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Means of eighths are exact. Kernels round vectors and their remainders differently, which
    # Newton-Schulz iterations would amplify.
    return [torch.randint(-8, 9, shape, generator=generator) / 8 for shape in SHAPES]


def sharded(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    meta = DTensor.from_local(
        torch.empty(1), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    return DTensor.from_local(
        local_part_of(full, meta).contiguous(),
        *(mesh, placements),
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def muon(parameters: list[nn.Parameter], nesterov: bool) -> torch.optim.Muon:
    rate = torch.tensor(0.02) if nesterov else 0.02
    options = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3} if nesterov else {}
    return torch.optim.Muon(parameters, lr=rate, momentum=0.5, nesterov=nesterov, **options)  # type: ignore[arg-type]


def check_against_one_device(
    mesh: DeviceMesh, cases: Sequence[tuple[Placement, ...]] = PLACEMENTS
) -> None:
    orthogonalize_full_matrices()
    for number, placements in enumerate(cases):
        nesterov = number % 2 == 0
        eager = [nn.Parameter(matrix) for matrix in matrices(0)]
        parameters = [nn.Parameter(sharded(matrix, mesh, placements)) for matrix in matrices(0)]
        optimizers = muon(eager, nesterov), muon(parameters, nesterov)
        for step in range(STEPS):
            for own, all_of_it, gradient in zip(parameters, eager, matrices(step + 1), strict=True):
                all_of_it.grad, own.grad = gradient, sharded(gradient, mesh, placements)
            for optimizer in optimizers:
                optimizer.step()
        for own, all_of_it in zip(parameters, eager, strict=True):
            assert isinstance(own, DTensor)
            shard = local_part_of(all_of_it.detach(), own)
            torch.testing.assert_close(own.to_local(), shard, rtol=1e-6, atol=1e-6)


def sharded_matrices_get_the_values_of_one_device() -> None:
    check_against_one_device(init_device_mesh("cpu", (2, 2)))


def shards_are_joined_in_the_order_of_the_mesh_and_not_of_ranks() -> None:
    check_against_one_device(DeviceMesh("cpu", [[0, 2], [1, 3]]))


# Two axes of sizes 1 and 2, whose ranks are half of all.
PAIR = Shard(0), Shard(1), Replicate()


def a_group_over_several_axes_has_the_timeout_of_all_ranks() -> None:
    with patch.object(dist, "new_group", wraps=dist.new_group) as created:
        mesh = init_device_mesh("cpu", (1, 2, 2))
        created.reset_mock()
        check_against_one_device(mesh, [PAIR])
    created.assert_called_once()
    assert created.call_args.kwargs["timeout"] == group_timeout(dist.group.WORLD)


CHECKS = [
    sharded_matrices_get_the_values_of_one_device,
    shards_are_joined_in_the_order_of_the_mesh_and_not_of_ranks,
    a_group_over_several_axes_has_the_timeout_of_all_ranks,
]

if __name__ == "__main__":
    run_checks(CHECKS)

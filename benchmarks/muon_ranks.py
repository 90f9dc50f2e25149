"""What `bench_muon.py` runs on every rank: steps of Muon on the same matrices, in turn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.optim import Muon

from shardwright.core.parallel.byte_counter import ByteCounter
from shardwright.core.runtime.muon import orthogonalize_full_matrices

LAYERS = 4
SHAPES = ((256, 256), (1024, 256), (256, 1024)) * LAYERS


def parameters(sharded: bool) -> list[nn.Parameter]:
    """The matrices with their gradients."""
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def drawn(shape: Sequence[int]) -> Tensor:
        full = torch.randn(*shape, generator=generator)
        return distribute_tensor(full, mesh, [Shard(0) if sharded else Replicate()])

    matrices = [nn.Parameter(drawn(shape)) for shape in SHAPES]
    for matrix in matrices:
        matrix.grad = drawn(matrix.shape)
    return matrices


def measured(matrices: list[nn.Parameter], rounds: int) -> tuple[list[float], int]:
    """Seconds of each step on the slowest rank, and bytes that this rank sends in one."""
    optimizer, seconds = Muon(matrices), []
    with ByteCounter() as counter:
        optimizer.step()
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        optimizer.step()
        slowest = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return seconds, counter.sent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    rounds = parser.parse_args().rounds
    dist.init_process_group("gloo")
    cases = {"by DTensor": parameters(sharded=True)}
    found = {"by DTensor": measured(cases["by DTensor"], rounds)}
    orthogonalize_full_matrices()
    for name in ("replicated", "sharded"):
        cases[name] = parameters(sharded=name == "sharded")
        found[name] = measured(cases[name], rounds)
    full = {n: [p.full_tensor() for p in c if isinstance(p, DTensor)] for n, c in cases.items()}
    ranks, numel = dist.get_world_size(), sum(a * b for a, b in SHAPES)
    result = {
        name: {
            "seconds": seconds,
            "bytes": sent,
            "all_gather": 2 * numel * (ranks - 1) // ranks,
            "difference": max(
                (a - b).abs().max().item()
                for a, b in zip(full[name], full["replicated"], strict=True)
            ),
        }
        for name, (seconds, sent) in found.items()
    }
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What `test_collectives.py` runs on every one of eight processes: an exchange over gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.core.layout.collective_spec import all_to_all_v_axes
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.runtime.collectives import bind
from shardwright.core.runtime.devices import Devices


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    torch.set_num_threads(1)
    mesh, rank = Layout((2, 4), ("a", "b")), dist.get_rank()
    source, target = mesh("a", "b", "None"), mesh("b", "a", "None")
    axes = all_to_all_v_axes(source, target)
    assert axes is not None
    step = RedistributionStep("all_to_all_v", axes, None, None, source, target)
    shape = (8, 8, 3)
    whole = torch.arange(192.0).reshape(shape)
    block = whole[source.slices(rank, shape)].clone().requires_grad_()
    moved = bind(step, Devices.of_process(mesh, torch.device("cpu")))(block)
    moved.backward(torch.cos(whole)[target.slices(rank, shape)])
    assert torch.equal(moved, whole[target.slices(rank, shape)])
    assert block.grad is not None
    assert torch.equal(block.grad, torch.cos(whole)[source.slices(rank, shape)])
    print(f"rank {rank} has its block", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

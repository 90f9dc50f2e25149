"""What `test_random_factors.py` runs on every rank: random plans train as one device does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from random_factors import random_factors
from random_plans import random_plan
from torchrun import run_checks


def check_losses_and_gradients() -> None:
    first, end = map(int, sys.argv[1:])
    for seed in range(first, end):
        net, args = random_factors(seed)
        loss = net(*args)
        loss.backward()
        plan = random_plan(sw.capture(net, args), dist.get_world_size(), seed)
        parallel = sw.parallelize(net, plan, "cpu", copy=True)
        got = parallel(*args)
        got.backward()
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, loss, rtol=1e-9, atol=1e-9, msg=f"loss of seed {seed}")
        for name, parameter in net.named_parameters():
            gradient = parallel.get_parameter(name).grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(
                whole, parameter.grad, rtol=1e-8, atol=1e-9, msg=f"{name} of seed {seed}"
            )


if __name__ == "__main__":
    run_checks([check_losses_and_gradients])

"""What `test_autograd_functions.py` runs on every rank: functions applied by bound names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from torchrun import run_checks


class STE(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True))


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


ste, softmax, clipped = STE.apply, Softmax.apply, Clipped.apply


class Net(nn.Module):
    def __init__(self, *functions: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for function in self.functions:
            y = function(y)
        loss: Tensor = self.last(y).square().mean()
        return loss


def batch() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def check_bound_functions_train_as_eager() -> None:
    for mode in ("data_parallel", "recursive_programming"):
        net, other = (Net(ste, softmax, clipped).double() for _ in range(2))
        plan = sw.plan(net, (batch(),), devices=2, mode=mode)
        parallel = sw.parallelize(net, plan, copy=True)
        for module in (parallel, other):
            module(batch()).backward()
        for name, parameter in parallel.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, other.get_parameter(name).grad, msg=name)


CHECKS = (check_bound_functions_train_as_eager,)


if __name__ == "__main__":
    run_checks(CHECKS)

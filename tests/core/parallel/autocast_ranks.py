"""What `test_module_autocast.py` runs on every rank: autocast around calls and inside of models."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from random_plans import random_plan
from shardwright.core.capture.capture import capture
from torchrun import run_checks

SEEDS = range(1)
ROUNDING = 0.03
"""Tolerance for bfloat16: sums over shards have another order."""

CANCELLING = 0.15
"""Tolerance for gradients that are small differences, as before a normalization."""


class Convolutions(nn.Module):
    """A model with batch statistics in float32 and an autocast region in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.groups = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.groups(self.norm(self.conv(x)).relu()).mean((2, 3))
            return F.cross_entropy(self.head(hidden), labels)


class Precise(nn.Module):
    """A model that is computed in float32 in every autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            logits = self.end(self.start(x).relu())
            return F.cross_entropy(logits, labels), logits


def llama() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        use_cache=False,
    )
    ids = torch.randint(0, 64, (8, 8))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(net: nn.Module, eager: nn.Module, tolerance: float) -> None:
    """Differences of gradients, relative to their own norm or to the largest norm."""
    wanted = {name: p.grad for name, p in eager.named_parameters()}
    largest = max(g.norm() for g in wanted.values() if g is not None)
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            error = (whole(parameter.grad) - wanted[name]).norm()  # type: ignore[operator]
            assert error < tolerance * max(wanted[name].norm(), 0.1 * largest), (name, error)  # type: ignore[union-attr]


def compare(
    net: nn.Module, eager: nn.Module, call: Mapping[str, Any], region: Callable[[], Any]
) -> tuple[Any, Any]:
    """Check that outputs and gradients in an autocast region have equal dtypes and close values."""
    results = []
    for each in (net, eager):
        each.zero_grad()
        with region():
            results.append(each(**call))
        results[-1].loss.backward()
    ours, wanted = results
    exact = not isinstance(region(), torch.autocast)
    assert ours.logits.dtype == wanted.logits.dtype
    assert ours.loss.dtype == wanted.loss.dtype
    torch.testing.assert_close(ours.loss, wanted.loss, rtol=1e-5 if exact else 2e-3, atol=0)
    check_gradients(net, eager, 1e-4 if exact else ROUNDING)
    return ours, wanted


def calls_in_a_region_cast_as_on_one_device() -> None:
    for seed in SEEDS:
        eager, call = llama()
        plan = random_plan(capture(eager, (), call), 4, seed)
        net = sw.parallelize(copy.deepcopy(eager), plan)
        compare(net, eager, call, lambda: torch.autocast("cpu", torch.bfloat16))
        compare(net, eager, call, torch.enable_grad)
        compare(net, eager, call, lambda: torch.autocast("cpu", torch.float16))


def steps_of_stages_cast_as_on_one_device() -> None:
    eager, call = llama()
    plan = sw.plan(eager, (), call, devices=4, stages=2, micro_batches=2)
    net = sw.parallelize(copy.deepcopy(eager), plan)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net.train_step(**call)
        wanted = eager(**call).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=2e-3, atol=0)
    check_gradients(net, eager, ROUNDING)


def evaluations_of_stages_cast_only_as_the_model_does() -> None:
    torch.manual_seed(0)
    eager = Precise()
    call = {"x": torch.randn(8, 8), "labels": torch.randint(0, 4, (8,))}
    with torch.autocast("cpu", torch.bfloat16):
        plan = sw.plan(eager, (), call, devices=4, stages=2, micro_batches=2)
        net = sw.parallelize(copy.deepcopy(eager), plan)
        with torch.no_grad():
            _, logits = net(**call)
            _, wanted = eager(**call)
    # In float32 sums over shards round 10,000 times finer than in bfloat16.
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)


def statistics_stay_in_single_precision() -> None:
    for seed in SEEDS:
        torch.manual_seed(0)
        eager = Convolutions()
        call = {"x": torch.randn(8, 4, 6, 6), "labels": torch.randint(0, 4, (8,))}
        plan = random_plan(capture(eager, (), call), 4, seed)
        net = sw.parallelize(copy.deepcopy(eager), plan)
        ours, wanted = net(**call), eager(**call)
        ours.backward()
        wanted.backward()
        torch.testing.assert_close(ours, wanted, rtol=5e-3, atol=0)
        check_gradients(net, eager, CANCELLING)
        for name, buffer in eager.named_buffers():
            torch.testing.assert_close(net.get_buffer(name), buffer, rtol=1e-3, atol=1e-3)


CHECKS = [
    calls_in_a_region_cast_as_on_one_device,
    steps_of_stages_cast_as_on_one_device,
    evaluations_of_stages_cast_only_as_the_model_does,
    statistics_stay_in_single_precision,
]

if __name__ == "__main__":
    run_checks(CHECKS)

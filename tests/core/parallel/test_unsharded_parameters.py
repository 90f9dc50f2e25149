"""Parameters through the micro-batches of a step: what is cast, how often, with which result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from sample_models import MLP, llama
from shardwright.core.parallel.module import ParallelModule

MICRO_BATCHES = 4


def built(recomputed: bool = False) -> tuple[ParallelModule, tuple[Any, ...], dict[str, Any]]:
    """A model stored in float32 and computed in bfloat16."""
    net, args, kwargs = llama(batch=8)
    if recomputed:
        sw.recompute(net.model.layers)
    options: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "compute_dtype": "bfloat16"}
    plan = sw.plan(net, args, kwargs, devices=1, mode="stand_alone", **options)
    assert bool(plan.recompute) == recomputed
    parallel = sw.parallelize(net, plan, "cpu", copy=True)
    assert isinstance(parallel, ParallelModule)
    return parallel, args, kwargs


def piece(call: Any, number: int) -> Any:
    """A micro-batch of a call's arguments."""
    return pytree.tree_map_only(Tensor, lambda t: t.chunk(MICRO_BATCHES)[number], call)


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16 by shape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **kwargs)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_casts_each_parameter_once_and_a_call_of_its_own_once_more(recomputed: bool) -> None:
    parallel, args, kwargs = built(recomputed)
    weights = sorted(tuple(p.shape) for p in parallel.parameters() if p.ndim == 2)
    first = piece(args, 0), piece(kwargs, 0)
    for call in (
        lambda: parallel.train_step(*args, **kwargs),
        lambda: parallel(*first[0], **first[1]).loss.backward(),
    ):
        with Casts() as casts:
            call()
        assert sorted(shape for shape in casts.shapes if shape in set(weights)) == weights


@pytest.mark.parametrize("recomputed", [False, True])
def test_steps_have_every_bit_of_micro_batches_that_cast_by_themselves(recomputed: bool) -> None:
    (mine, args, kwargs), (other, *_) = built(recomputed), built(recomputed)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (mine, other)]
    for _ in range(3):
        loss, total = mine.train_step(*args, **kwargs), torch.zeros(())
        for number in range(MICRO_BATCHES):
            part = other(*piece(args, number), **piece(kwargs, number)).loss
            (part / MICRO_BATCHES).backward()
            total += part.detach() / MICRO_BATCHES
        torch.testing.assert_close(loss, total, rtol=1e-6, atol=0)
        for one, two in zip(mine.parameters(), other.parameters(), strict=True):
            assert one.grad is not None and one.grad.dtype == torch.float32
            assert torch.equal(one.grad, two.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_the_next_step_casts_what_the_optimizer_has_written() -> None:
    net = MLP((4, 4))
    x, target = torch.ones(4, 4), torch.zeros(4, 4)
    plan = sw.plan(net, (x, target), devices=1, micro_batches=2, compute_dtype="bfloat16")
    parallel = sw.parallelize(net, plan, "cpu", copy=True)
    assert parallel.train_step(x, target) > 0
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    assert parallel.train_step(x, target) == 0


def test_a_frozen_parameter_is_cast_and_has_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    x = torch.randn(4, 4)
    whole = sw.WithLoss(net, nn.MSELoss())
    options: dict[str, Any] = {"micro_batches": 2, "compute_dtype": "bfloat16"}
    parallel = sw.parallelize(whole, sw.plan(whole, (x, x), devices=1, **options), "cpu", copy=True)
    parallel.train_step(x, x)
    gradients = {name: p.grad is not None for name, p in parallel.named_parameters()}
    assert list(gradients.values()) == [False, False, True, True]

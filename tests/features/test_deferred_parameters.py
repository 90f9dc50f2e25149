"""Deferred parameters are stored as planned: this rank's blocks of the values of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import sample_models as models
import shardwright as sw
from random_plans import random_plan


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """A process group in which this process is `rank`, and collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def deferred_twin(build: Callable[[], models.Model]) -> nn.Module:
    """The model of `build`, which seeds itself."""
    with sw.no_init_parameters():
        return build()[0]


@pytest.mark.parametrize("build", [models.mlp, models.resnet, models.gpt2, models.llama])
def test_every_rank_stores_its_blocks_of_the_values_of_one_device(
    build: Callable[[], models.Model],
) -> None:
    net, args, kwargs = build()
    graph = sw.capture(net, args, kwargs)
    for seed, rank in ((0, 0), (1, 3), (2, 7)):
        plan = random_plan(graph, 8, seed)
        with as_rank(rank, 8):
            parallel = sw.parallelize(deferred_twin(build), plan)
        whole = dict(net.named_parameters())
        assert [name for name, _ in parallel.named_parameters()] == list(whole)
        for name, parameter in parallel.named_parameters():
            assert isinstance(parameter, DTensor)
            stored = plan.storage.get(name, ((),) * parameter.ndim)
            where = sw.TensorLayout(plan.mesh, tuple(stored))
            block = whole[name][where.slices(rank, tuple(parameter.shape))]
            assert torch.equal(parameter.to_local(), block), name
        for name, buffer in parallel.named_buffers():
            assert torch.equal(buffer, net.get_buffer(name)), name


@pytest.mark.parametrize("build", [models.mlp, models.gpt2])
def test_a_deferred_model_is_planned_and_checked_like_one_with_values(
    build: Callable[[], models.Model],
) -> None:
    net, args, kwargs = build()
    twin = deferred_twin(build)
    plan = sw.plan(twin, args, kwargs, devices=4)
    assert plan.cuts == sw.plan(net, args, kwargs, devices=4).cuts
    result = sw.check(twin, args, kwargs, plan)
    assert result.passes()
    assert result.loss == sw.check(net, args, kwargs, plan).loss


def test_on_one_device_and_wrapped_it_starts_with_the_same_loss() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    torch.manual_seed(0)
    with sw.no_init_parameters():
        twin = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    wrapped = sw.WithLoss(twin, nn.MSELoss())
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    parallel = sw.parallelize(wrapped, sw.plan(wrapped, (x, y), devices=1), copy=True)
    torch.testing.assert_close(parallel(x, y), nn.MSELoss()(net(x), y))


def test_parameters_of_which_nothing_says_how_to_initialize_them_are_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    plan = sw.plan(net, (torch.zeros(2, 4),), devices=1)
    with pytest.raises(
        sw.PlanError, match=r"the Linear was built .* are uninitialized: weight, bias"
    ):
        sw.parallelize(net, plan)(torch.zeros(2, 4))

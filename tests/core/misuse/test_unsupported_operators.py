"""What DTensors cannot do is computed, or says what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from core.misuse.own_optimizer_ranks import CHECKS
from shardwright.core.api.lone_rank import fake_process_group
from shardwright.core.misuse.unsupported_operators import compute_unsupported_operators
from shardwright.errors import MixedTensorsError, PlanError
from torchrun import checks_on_ranks

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_process_group(0, 2):
        compute_unsupported_operators()
        yield


def trained(make: Make) -> DTensor:
    local = torch.ones(2, 4)
    parameter = nn.Parameter(DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = make([parameter])
    (parameter * parameter).sum().backward()
    optimizer.step()
    assert isinstance(parameter, DTensor)
    return parameter


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adamax])
def test_other_optimizers_run(kind: type[torch.optim.Optimizer]) -> None:
    assert trained(lambda p: kind(p, lr=0.1)).to_local().lt(1).all()  # type: ignore[call-arg]


def test_tensors_of_different_shapes_are_not_equal() -> None:
    mesh = init_device_mesh("cpu", (2,))
    columns = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(1)])
    rows = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    assert not torch.equal(rows, columns)
    assert not torch.equal(columns, rows)
    assert torch.equal(columns, columns)


@pytest.mark.parametrize(
    "meet",
    [
        lambda p: p * torch.ones(4, 4),
        lambda p: torch.ones(4, 4) - p,
        lambda p: (p * 1).sub_(torch.ones(4, 4)),
        lambda p: torch.ones(4, 4).div_(p),
        lambda p: torch.ones(4, 4).copy_(p),
        lambda p: torch.zeros(()).add_(p.sum()),
        lambda p: torch.cat([p, torch.ones(4, 4)]),
        lambda p: nn.functional.mse_loss(p, torch.ones(4, 4)),
        lambda p: torch.ones(4, 4) @ p,
        lambda p: torch._foreach_add([p], [torch.ones(4, 4)]),
        lambda p: p.detach().numpy(),
        lambda p: p.tolist(),
    ],
)
def test_a_parameter_that_meets_an_ordinary_tensor_says_what_to_do(
    meet: Callable[[DTensor], object],
) -> None:
    local = torch.ones(2, 4, requires_grad=True)
    parameter = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(MixedTensorsError, match=r"use the full parameter \(`p.full_tensor\(\)`"):
        meet(parameter)


test_on_ranks = checks_on_ranks(CHECKS, 2)


def test_views_that_dtensors_lack_are_refused() -> None:
    parameter = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(PlanError, match=r"resize_.* is not supported .*\n.*full_tensor"):
        parameter.resize_(2)


def test_an_operator_that_dtensors_have_in_this_case_is_computed() -> None:
    whole = DTensor.from_local(torch.full((2,), 3.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert whole.pow_(2).to_local().eq(9).all()
    assert whole.pow_(2).to_local().eq(81).all()

"""Operators of single elements on DTensors that are cut alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh

from shardwright.core.api.lone_rank import fake_process_group
from shardwright.core.misuse.unsupported_operators import compute_unsupported_operators

RANKS = 4

OPERATORS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add_": lambda x, y, z: x.add_(y, alpha=0.5),
    "mul_": lambda x, y, z: x.mul_(0.9),
    "mul_ by another": lambda x, y, z: x.mul_(y),
    "addcdiv_": lambda x, y, z: x.addcdiv_(y, z, value=-0.1),
    "addcmul_": lambda x, y, z: x.addcmul_(y, z, value=0.1),
    "lerp_": lambda x, y, z: x.lerp_(y, 0.1),
    "+=": lambda x, y, z: x.__iadd__(y),
    "sqrt": lambda x, y, z: x.sqrt(),
    "/": lambda x, y, z: x / 3,
    "/ another": lambda x, y, z: x / y,
}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with fake_process_group(0, RANKS):
        compute_unsupported_operators()
        yield


def tensors(
    placements: Sequence[Placement], dtypes: Sequence[torch.dtype] = (torch.float32,) * 3
) -> list[DTensor]:
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2))
    drawn = (0.5 + torch.rand(3, 5, generator=generator) for _ in dtypes)
    return [
        DTensor.from_local(x.to(dtype), mesh, placements)
        for x, dtype in zip(drawn, dtypes, strict=True)
    ]


def by_pytorch(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        for name in ("add_", "mul_", "addcdiv_", "addcmul_", "lerp_", "__iadd__", "sqrt"):
            patch.setattr(DTensor, name, getattr(Tensor, name))
        patch.setattr(DTensor, "__truediv__", Tensor.__truediv__)
        return call()


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Replicate(), Partial()),
        (Partial(), Shard(1)),
    ],
)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_pytorchs_own_gives(
    name: str, placements: Sequence[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> tuple[DTensor, Any]:
        x, y, z = tensors(placements)
        with torch.no_grad():
            return x, OPERATORS[name](x, y, z)

    try:
        own_changed, own = by_pytorch(call, monkeypatch)
    except RuntimeError as refused:
        # Terms of a sum cannot be changed to what is none.
        assert any(placement.is_partial() for placement in placements)
        with pytest.raises(RuntimeError, match=str(refused)[:40]):
            call()
        return
    changed, result = call()
    for one, other in ((changed, own_changed), (result, own)):
        assert one.placements == other.placements
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.to_local(), other.to_local())
    assert (result is changed) == (own is own_changed)


def test_tensors_of_two_dtypes_are_promoted_as_pytorch_does() -> None:
    x, y, _ = tensors((Shard(0), Shard(1)), (torch.bfloat16, torch.float32, torch.float32))
    with torch.no_grad():
        quotient = x / y
    assert quotient.dtype == quotient.to_local().dtype == torch.float32


def test_numbers_are_divided_into_fractions_where_they_are_whole() -> None:
    whole = DTensor.from_local(torch.tensor([3]), init_device_mesh("cpu", (RANKS,)), [Replicate()])
    with torch.no_grad():
        half = whole / 2
    assert half.dtype == torch.float32
    assert half.to_local().item() == 1.5


def test_tensors_that_are_cut_apart_meet_as_pytorch_lets_them() -> None:
    x, y, _ = tensors((Replicate(), Replicate()))
    rows = y.redistribute(placements=(Replicate(), Shard(0)))
    with torch.no_grad():
        quotient = rows / x
    assert quotient.placements == rows.placements
    assert quotient.to_local().shape == rows.to_local().shape != x.shape


def test_a_tensor_that_is_changed_after_it_was_saved_is_refused_by_the_backward_pass() -> None:
    x, y, _ = tensors((Shard(0), Replicate()))
    leaf = x.detach().requires_grad_()
    loss = (leaf * y).sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_step_of_an_optimizer_does_what_an_eager_one_does() -> None:
    stepped = []
    for compiled in (False, True):
        torch.compiler.reset()
        parameters = [torch.nn.Parameter(x) for x in tensors((Shard(0), Shard(1)))]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        step()
        stepped.append([parameter.detach().to_local() for parameter in parameters])
    for eager, own in zip(*stepped, strict=True):
        torch.testing.assert_close(own, eager)

"""Gathered parameters that the backward pass gathers again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw

PLAN = {"mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}}


class Spectral(nn.Module):
    """Multiply samples by one parameter, as seen by `view`."""

    def __init__(self, weight: Tensor, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.view = nn.Parameter(weight), nn.Parameter(torch.ones(3)), view

    def forward(self, x: Tensor) -> Tensor:
        product = self.view(self.weight) * (x * self.bias).exp()
        return product.abs().square().mean()


@pytest.mark.parametrize(
    ("shape", "dtype", "view"),
    [
        ((2, 3, 2), torch.float32, torch.view_as_complex),
        ((3, 3, 2), torch.float32, lambda weight: torch.view_as_complex(weight)[1:].conj()),
        ((2, 3), torch.complex64, lambda weight: torch.view_as_real(weight)[..., 0]),
        ((2, 3), torch.complex64, lambda weight: weight.conj().imag),
    ],
)
def test_views_of_another_dtype_are_gathered_as_such(
    shape: tuple[int, ...], dtype: torch.dtype, view: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model, x = Spectral(torch.randn(shape, dtype=dtype), view), (torch.randn(8, 2, 3),)
    plan = sw.plan(model, x, devices=2, **PLAN)
    assert sw.check(model, x, None, plan).passes()


class Queries(nn.Module):
    """A linear layer of a parameter that is expanded to the samples, of which it saves a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.linear = nn.Parameter(torch.randn(1, 4, 16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(self.queries.expand(len(x), -1, -1)) * x).mean()


class Quantized(nn.Module):
    """A linear layer whose weight is scaled by its detached maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.linear.weight.abs().amax().detach()
        return (x @ self.linear.weight * scale + self.linear.bias).exp().mean()


@pytest.mark.parametrize("make", [Queries, Quantized])
def test_gathers_are_planned_for_what_the_backward_pass_reads(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), (torch.randn(8, 4, 16),)
    assert sw.check(model, x, None, sw.plan(model, x, devices=2, **PLAN)).passes()


class Adapted(nn.Module):
    """A frozen weight with a trained difference, as in LoRA, in a part that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.adapted, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.adapted.weight.requires_grad_(False)
        nn.utils.parametrize.register_parametrization(self.adapted, "weight", Difference())
        sw.recompute(self.adapted)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.adapted(x).relu()).square().mean()  # type: ignore[no-any-return]


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.difference = nn.Parameter(torch.randn(8, 8))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.difference


def test_frozen_parameters_of_a_recomputed_part_count_as_gathered_twice() -> None:
    model, x = Adapted(), (torch.randn(8, 8),)
    assert sw.check(model, x, None, sw.plan(model, x, devices=2, **PLAN)).passes()

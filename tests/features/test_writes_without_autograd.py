"""Results that `forward` changes in place without autograd: the new value gets the gradient of the
old one, as in the eager module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.usefixtures("untried_suggestions")


def clamp(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(-0.3, 0.3)
    return h


def fill_columns(h: Tensor) -> Tensor:
    with torch.no_grad():
        h[:, 2:4] = 0.5
    return h


def clamp_a_detached_view(h: Tensor) -> Tensor:
    # As `torch.distributions.Gamma.rsample` does.
    h.detach().clamp_(min=0.1)
    return h


def clamp_the_data(h: Tensor) -> Tensor:
    h.data.clamp_(-0.2, 0.2)
    return h


def read_a_view_that_was_written(h: Tensor) -> Tensor:
    view = h.view(-1, 2, 4)
    with torch.no_grad():
        view.mul_(2)
    return h + view.sum((1, 2))[:, None]


def read_a_detached_view_that_was_written(h: Tensor) -> Tensor:
    detached = h.detach()
    with torch.no_grad():
        detached[:, 0].add_(1)
    return h + detached.sum(1, keepdim=True)


def write_twice(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(-0.3, 0.3)
        h.add_(1)
    h = h + 0.5
    h.detach()[:, :2].zero_()
    return h


def write_between_writes_with_autograd(h: Tensor) -> Tensor:
    h[:, 0] = h[:, 3] * 3
    with torch.no_grad():
        h[:, 1] = 9
    h[:, 2] = h[:, 1] * 2
    return h


def write_a_transposed_view(h: Tensor) -> Tensor:
    transposed = h.t()
    with torch.no_grad():
        transposed[0].fill_(0.25)
    return transposed.t()


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.outer, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.outer(self.write(self.inner(x))) - y).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "write",
    [
        clamp,
        fill_columns,
        clamp_a_detached_view,
        clamp_the_data,
        read_a_view_that_was_written,
        read_a_detached_view_that_was_written,
        write_twice,
        write_between_writes_with_autograd,
        write_a_transposed_view,
    ],
)
def test_values_and_gradients_are_those_of_the_eager_module(
    write: Callable[[Tensor], Tensor], micro_batches: int
) -> None:
    torch.manual_seed(0)
    net, batch = Writes(write), (torch.randn(8, 8), torch.randn(8, 8))
    plan = sw.plan(net, batch, devices=4, micro_batches=micro_batches)
    assert sw.check(net, batch, {}, plan).passes()


def change_a_saved_result(h: Tensor) -> Tensor:
    h = h.tanh()
    h.data.mul_(0.5)
    return h


def change_what_a_product_saved(h: Tensor) -> Tensor:
    squares = h * h
    h.data.mul_(0.5)
    return h + squares


def change_what_a_product_of_views_saved(h: Tensor) -> Tensor:
    transposed = h.t()
    squares = (transposed * transposed).t()
    with torch.no_grad():
        h.mul_(0.5)
    return h + squares


def change_one_of_several_saved_parts(h: Tensor) -> Tensor:
    left, right = h.chunk(2, dim=1)
    squares = left * left + right
    h.data.mul_(0.5)
    return h + torch.cat((squares, squares), 1)


@pytest.mark.parametrize(
    "write",
    [
        change_a_saved_result,
        change_what_a_product_saved,
        change_what_a_product_of_views_saved,
        change_one_of_several_saved_parts,
    ],
)
def test_a_change_of_what_a_gradient_needs_is_refused(write: Callable[[Tensor], Tensor]) -> None:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(sw.CaptureError, match="the gradient of an earlier operator needs it"):
        sw.plan(Writes(write), batch, devices=4)


def test_a_change_before_the_gradient_needs_the_tensor_is_not_refused() -> None:
    def write_and_square(h: Tensor) -> Tensor:
        h.data.mul_(0.5)
        return h * h

    torch.manual_seed(0)
    net, batch = Writes(write_and_square), (torch.randn(8, 8), torch.randn(8, 8))
    assert sw.check(net, batch, {}, sw.plan(net, batch, devices=4)).passes()

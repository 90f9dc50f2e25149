"""Which parameters the backward pass needs, on operators of known gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.graph.saved_tensors import (
    needed_in_backward,
    returned_before_update,
    saved_before_update,
    saved_tensors,
)


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.first = nn.Linear(4, 4)
        self.turned = nn.Parameter(torch.ones(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.table(ids)) * self.scale
        return (x @ self.turned.t()).square().mean()


def kept(net: nn.Module, *args: Tensor) -> set[str]:
    graph = sw.capture(net, args)
    uses = needed_in_backward(graph)
    return {graph.by_name[name].inputs[index].name for name, index in uses}


def test_weights_are_kept_but_not_embeddings_and_biases() -> None:
    assert kept(Uses(), torch.zeros(3, dtype=torch.long)) == {"first.weight", "turned", "scale"}


def test_the_first_weight_is_not_kept_where_the_input_needs_no_gradient() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.layer(x), torch.zeros_like(x))

    assert kept(Plain(), torch.randn(2, 4)) == set()


def test_a_weight_is_not_kept_where_a_copy_of_it_is() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cast, self.turned, self.viewed = (
                nn.Parameter(torch.ones(2, 4, dtype=torch.float64)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            flat = self.turned.t().reshape(8) * self.viewed.reshape(8)
            return (self.cast.to(torch.float32).reshape(8) * flat * x).sum()

    assert kept(Copied(), torch.ones(8)) == {"viewed"}


def test_buffers_are_kept_that_are_updated_after_they_scaled_something() -> None:
    class Scaled(nn.Module):
        scale: Tensor
        shift: Tensor
        turned: Tensor
        fixed: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            for name in ("scale", "shift", "turned", "fixed"):
                self.register_buffer(name, torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = (self.layer(x) * self.scale * self.fixed + self.shift) @ self.turned.t()
            with torch.no_grad():
                for buffer in (self.scale, self.shift, self.turned):
                    buffer.mul_(0.5)
            return y.sum()

    graph = sw.capture(Scaled(), (torch.ones(4, 4),))
    assert {value.name for value in saved_before_update(graph)} == {"scale", "turned"}


def test_buffers_are_kept_whose_old_values_are_returned_or_put_into_another() -> None:
    class Moving(nn.Module):
        viewed: Tensor
        handed_on: Tensor
        last: Tensor
        summed: Tensor

        def __init__(self) -> None:
            super().__init__()
            for name in ("viewed", "handed_on", "last", "summed"):
                self.register_buffer(name, torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            before, total = self.viewed, self.summed.sum()
            self.last = self.handed_on
            self.viewed, self.handed_on, self.summed = before + x, x * 2, x * 3
            return before[:2], total

    graph = sw.capture(Moving(), (torch.ones(4),))
    assert {value.name for value in returned_before_update(graph)} == {"viewed", "handed_on"}


def test_what_two_gradients_need_is_counted_once() -> None:
    graph = sw.capture(
        nn.CrossEntropyLoss(), (torch.ones(4, 8, requires_grad=True), torch.ones(4).long())
    )
    (loss,) = graph.ops
    assert [shape for shape, _ in saved_tensors(loss).others if len(shape) == 2] == [(4, 8)]


def test_an_operator_whose_arguments_only_a_kernel_rejects_is_named_with_its_line() -> None:
    layers = nn.Sequential(nn.Linear(4, 4))
    graph = sw.capture(layers.append(nn.Dropout(float("nan"))), (torch.ones(2, 4),))
    (dropout,) = (op for op in graph.ops if op.short_name == "dropout")
    with pytest.raises(sw.CaptureError, match=r"operator '1' \(dropout\) cannot run: .*\ncorrect"):
        saved_tensors(dropout)

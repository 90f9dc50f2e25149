from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError


class Autoencoder(nn.Module):
    def __init__(self, tie: Callable[[Autoencoder], None]) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        tie(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(x.mean(0).detach())
        return self.decoder(self.encoder(x - self.mean).relu()).square().mean()


def transposed_data(net: Autoencoder) -> None:
    net.decoder.weight.data = net.encoder.weight.data.t()


def a_parameter_of_the_same_data(net: Autoencoder) -> None:
    net.decoder.weight = nn.Parameter(net.encoder.weight.data)


def a_buffer_of_the_data(net: Autoencoder) -> None:
    net.mean = net.encoder.bias.data


@pytest.mark.parametrize(
    "tie", [transposed_data, a_parameter_of_the_same_data, a_buffer_of_the_data]
)
def test_tensors_whose_memory_a_step_changes_together_are_refused_by_name(
    tie: Callable[[Autoencoder], None],
) -> None:
    with pytest.raises(
        CaptureError, match=r"(?s)'encoder\..*two tensors in the same memory.*clone"
    ):
        capture(Autoencoder(tie), (torch.randn(8, 4),))


def one_parameter(net: Autoencoder) -> None:
    net.decoder.weight = net.encoder.weight


def columns_of_one_tensor(net: Autoencoder) -> None:
    flat = torch.randn(4, 8)
    net.encoder.weight, net.decoder.weight = (nn.Parameter(half) for half in flat.chunk(2, 1))


def frozen_data(net: Autoencoder) -> None:
    transposed_data(net)
    net.encoder.weight.requires_grad_(False)
    net.decoder.weight.requires_grad_(False)


@pytest.mark.parametrize("tie", [one_parameter, columns_of_one_tensor, frozen_data])
def test_others_are_captured(tie: Callable[[Autoencoder], None]) -> None:
    assert capture(Autoencoder(tie), (torch.randn(8, 4),)).loss is not None


class Scaled(nn.Module):
    def __init__(self, hold: Callable[[Scaled], None]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.rescale = self.scaled
        hold(self)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.rescale(self.layer(x)).square().mean()


def in_a_lambda(net: Scaled) -> None:
    net.rescale = lambda x: x * net.scale


def in_a_hook(net: Scaled) -> None:
    net.layer.register_forward_hook(lambda module, args, output: output + net.scale)


def as_a_view_in_an_attribute(net: Scaled) -> None:
    net.view = net.scale.data[:2]
    net.rescale = lambda x: x[:, :2] * net.view


def test_a_view_of_a_parameter_that_would_become_a_constant_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"(?s)'scale' is also read through.*`self.weight`"):
        capture(Scaled(as_a_view_in_an_attribute), (torch.randn(8, 4),))


@pytest.mark.parametrize("hold", [in_a_lambda, in_a_hook])
def test_a_parameter_that_a_function_of_the_model_reads_is_trained(
    hold: Callable[[Scaled], None],
) -> None:
    net, batch = Scaled(hold), (torch.randn(8, 4),)
    plan = sw.plan(net, batch, devices=4)
    assert "scale" in plan.parameters
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1))
    planned(*batch).backward()
    parameter = dict(planned.named_parameters())["scale"]
    assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def test_a_method_in_an_attribute_reads_parameters() -> None:
    graph = capture(Scaled(lambda net: None), (torch.randn(8, 4),))
    assert {value.name for value in graph.parameters} == {"layer.weight", "layer.bias", "scale"}

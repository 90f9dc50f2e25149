from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture.capture import capture
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
    with pytest.raises(CaptureError, match=r"'encoder\..*two tensors in the same memory.*clone"):
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

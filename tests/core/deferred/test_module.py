"""`materialize`: a deferred model becomes what it would have been."""

from __future__ import annotations

import torch
from torch import nn

import shardwright as sw
from core.deferred.initialized import layers


class WithAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = torch.arange(4).float()
        self.shifts = [torch.rand(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.shifts[0]


def test_parameters_stay_the_objects_that_an_optimizer_holds() -> None:
    torch.manual_seed(0)
    wanted = layers()
    torch.manual_seed(0)
    with sw.no_init_parameters():
        net = layers()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = list(net.parameters())
    assert sw.materialize(net) is net
    assert [id(parameter) for parameter in net.parameters()] == [id(p) for p in before]
    assert net[0][1].weight is net[0][0].weight
    for model in (net, wanted):
        made = torch.optim.SGD(model.parameters(), lr=0.1) if model is wanted else optimizer
        model[2](torch.ones(3, 4))[0].sum().backward()
        made.step()
    for got, parameter in zip(net.parameters(), wanted.parameters(), strict=True):
        assert type(got) is nn.Parameter
        assert torch.equal(got, parameter)


def test_plain_attributes_get_their_values_too() -> None:
    torch.manual_seed(0)
    wanted = WithAttributes()
    torch.manual_seed(0)
    with sw.no_init_parameters():
        net = WithAttributes()
    x = torch.randn(2, 4)
    assert torch.equal(sw.materialize(net)(x), wanted(x))


def test_a_model_with_values_stays_as_it_is() -> None:
    net = nn.Linear(4, 4)
    weight = net.weight
    assert sw.materialize(net).weight is weight

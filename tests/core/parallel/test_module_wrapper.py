"""What is read and set on what stands for a model is the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.errors import PlanError

BATCH = torch.randn(4, 8)


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.seed = self.steps = self.alpha = 1.0
        self.unset: float | None = None

    @property
    def width(self) -> int:
        return self.linear.in_features

    def twice(self, x: Tensor) -> Tensor:
        return 2 * self(x)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.linear(x), 1.0, self.training).square().mean() + x.mean()
        result: Tensor = y * self.alpha * self.scale * self.seed * self.steps
        return result if self.unset is None else result * self.unset


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "parallelize": lambda net: sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True),
    "AutoParallel": sw.AutoParallel,
    "AutoParallel of a Pipeline": lambda net: sw.AutoParallel(sw.Pipeline(net, micro_batches=1)),
    "Pipeline": lambda net: sw.Pipeline(net, micro_batches=1),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_attributes_and_modes_of_the_model_are_read_set_and_deleted(name: str) -> None:
    net = Net()
    wrapper = WRAPPERS[name](Net())
    for attribute in ("alpha", "scale", "seed", "steps", "unset", "alpha"):
        for model in (net, wrapper):
            setattr(model, attribute, (getattr(model, attribute) or 1.0) * 2)
        assert getattr(wrapper, attribute) == getattr(net, attribute)
        torch.testing.assert_close(wrapper(BATCH), net(BATCH), msg=attribute)
    for model in (net, wrapper):
        model.eval()
    torch.testing.assert_close(wrapper(BATCH), net(BATCH))
    assert wrapper.width == 8
    del net.scale, wrapper.scale
    torch.testing.assert_close(wrapper(BATCH), net(BATCH))
    assert wrapper.scale == 1.0
    with pytest.raises(AttributeError, match="missing"):
        del wrapper.missing


@pytest.mark.parametrize("name", sorted(WRAPPERS.keys() - {"parallelize"}))
def test_methods_of_the_model_which_would_run_it_as_a_whole_are_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match="twice"):
        WRAPPERS[name](Net()).twice(BATCH)


@pytest.mark.parametrize("name", sorted(WRAPPERS.keys() - {"Pipeline"}))
def test_methods_of_a_planned_model_run_it_as_planned(name: str) -> None:
    wrapper = WRAPPERS[name](Net())
    torch.testing.assert_close(wrapper(BATCH), Net()(BATCH))
    torch.testing.assert_close(wrapper.twice(BATCH), Net().twice(BATCH))


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("parallelize", "program"),
        ("parallelize", "execution"),
        ("AutoParallel", "options"),
        ("AutoParallel of a Pipeline", "plan"),
        ("Pipeline", "micro_batches"),
    ],
)
def test_an_attribute_with_the_name_of_one_of_the_wrappers_own_is_refused(
    name: str, attribute: str
) -> None:
    net = Net()
    setattr(net, attribute, 3)
    with pytest.raises(
        PlanError, match=f"(?s)Net has an attribute '{attribute}', .*rename the attribute"
    ):
        WRAPPERS[name](net)

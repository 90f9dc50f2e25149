"""Optimizers that combine several parameters in a step are told from all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from shardwright.core.misuse.coupled_updates import TrialError, has_coupled_updates
from shardwright.core.runtime.total_norms import extend_total_norms

INDEPENDENT = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD"),
)


class Scaled(Optimizer):
    """Gradient descent, whose step is divided by `norm` of the gradients."""

    def __init__(
        self, params: Any, norm: Callable[[list[Tensor]], Any], max_norm: float = 0
    ) -> None:
        super().__init__(params, {"lr": 0.1})
        self.norm, self.max_norm = norm, max_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        listed = [p for group in self.param_groups for p in group["params"]]
        norm = self.norm([p.grad for p in listed])
        for parameter in listed:
            parameter.sub_(parameter.grad, alpha=0.1 / max(float(norm), self.max_norm, 1))


class EachScaled(Scaled):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.rand_like(parameter)
                parameter.sub_(parameter.grad * noise / self.norm([parameter.grad]))


class Ascending(Optimizer):
    """Sharpness-aware minimization: the step of `inner` with the gradients at other parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        listed = [p for group in self.param_groups for p in group["params"]]
        norm = own_norm([p.grad for p in listed])
        ascents = [p.grad / norm for p in listed]
        for parameter, ascent in zip(listed, ascents, strict=True):
            parameter.add_(ascent)
        closure()
        for parameter, ascent in zip(listed, ascents, strict=True):
            parameter.sub_(ascent)
        self.inner.step()


class Averaging(Optimizer):
    """Every second step moves averages, as large as the parameters, and reads a list of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.listed = self.param_groups[0]["params"]
        self.means = [p.detach().clone() for p in self.listed]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for parameter, mean in zip(self.listed, self.means, strict=True):
            parameter.sub_(parameter.grad)
            if self.steps % 2 == 0:
                parameter.copy_(mean.lerp_(parameter, 0.5))


def own_norm(gradients: Iterable[Tensor]) -> float:
    return float(sum((g**2).sum().item() for g in gradients) ** 0.5)


def parameters() -> list[nn.Parameter]:
    layers = nn.Sequential(nn.Linear(300, 8), nn.LayerNorm(8), nn.Conv1d(3, 5, 3))
    return list(layers.parameters())


@pytest.mark.parametrize("name", INDEPENDENT)
def test_optimizers_of_pytorch_update_each_parameter_alone(name: str) -> None:
    assert not has_coupled_updates(getattr(torch.optim, name)(parameters(), lr=0.1))


def test_lbfgs_combines_parameters() -> None:
    assert has_coupled_updates(torch.optim.LBFGS(parameters()))


def test_norms_of_all_gradients_combine_parameters() -> None:
    assert has_coupled_updates(Scaled(parameters(), own_norm))
    assert has_coupled_updates(Scaled(parameters()[:1], own_norm))
    assert has_coupled_updates(Scaled(parameters(), own_norm, max_norm=100))
    assert has_coupled_updates(Ascending(parameters()))


def test_norms_of_each_gradient_and_of_pytorch_do_not() -> None:
    extend_total_norms()
    assert not has_coupled_updates(Scaled(parameters(), get_total_norm))
    assert not has_coupled_updates(EachScaled(parameters(), own_norm))
    assert not has_coupled_updates(Averaging(parameters()))


def test_the_optimizer_and_random_numbers_are_as_before() -> None:
    listed = parameters()
    optimizer = EachScaled(listed, own_norm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before, random = [p.detach().clone() for p in listed], torch.get_rng_state()
    has_coupled_updates(optimizer)
    torch.testing.assert_close([p.detach() for p in listed], before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state and all(p.grad is None for p in listed)
    assert schedule.last_epoch == 0


def test_a_step_that_reaches_the_model_is_not_tried() -> None:
    listed = parameters()
    before = [p.detach().clone() for p in listed]

    def writing(_: object) -> float:
        listed[0].zero_()
        return 1.0

    with pytest.raises(TrialError, match="accesses parameters"):
        has_coupled_updates(Scaled(listed, writing))
    torch.testing.assert_close([p.detach() for p in listed], before, rtol=0, atol=0)

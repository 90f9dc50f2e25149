"""What optimizers keep: asked of PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from shardwright.core.cost.optimizer_state import optimizer_bytes, optimizer_name
from shardwright.errors import PlanError

SHAPES = [((10, 10), torch.float32), ((10, 10), torch.float32), ((50,), torch.float32)]


@pytest.mark.parametrize(
    ("kind", "copies", "counters"),
    [("sgd", 0, 0), ("momentum", 1, 0), ("adam", 2, 3), ("adamw", 2, 3)],
)
def test_state_is_so_many_copies_of_the_parameters(kind: str, copies: int, counters: int) -> None:
    found = optimizer_bytes(kind, SHAPES)
    assert found.state == copies * 250 * 4 + counters * 4


def test_a_step_needs_at_most_some_copies_of_the_largest_parameter() -> None:
    small = optimizer_bytes("adamw", SHAPES).temporary
    assert small in (400, 800, 1200)
    assert optimizer_bytes("adamw", SHAPES * 5).temporary == small
    assert optimizer_bytes("sgd", SHAPES).temporary == 0


def test_an_optimizer_can_be_given_in_place_of_a_name() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    given = torch.optim.Adam([parameter], lr=0.1, amsgrad=True)
    assert optimizer_bytes(given, SHAPES).state == 3 * 1000 + 12
    assert optimizer_name(given) == "Adam"
    assert not given.state


def test_an_unknown_name_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        PlanError,
        match=r"optimizer='lion': unknown optimizer\nuse one of sgd, momentum, adam, adamw",
    ):
        optimizer_bytes("lion", SHAPES)


@pytest.mark.parametrize("name", ["Adafactor", "ASGD", "Rprop", "Muon", "NAdam", "Adamax"])
def test_the_state_of_any_optimizer_of_pytorch_is_what_it_holds_after_a_step(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(12, 30)), torch.nn.Parameter(torch.ones(48, 12))]
    optimizer = getattr(torch.optim, name)(parameters)
    predicted = optimizer_bytes(optimizer, [(tuple(p.shape), p.dtype) for p in parameters]).state
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [t for values in optimizer.state.values() for t in values.values()]
    held = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    assert predicted == held > 0


def test_parameters_that_an_optimizer_does_not_take_have_no_state_in_it() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    assert optimizer_bytes(torch.optim.Muon([matrix]), [((50,), torch.float32)]).state == 0


def test_an_optimizer_that_needs_more_than_a_gradient_is_refused_with_its_name() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(PlanError, match=r"optimizer=LBFGS: .*closure.*\n.*optimizer='adamw'"):
        optimizer_bytes(torch.optim.LBFGS([matrix]), SHAPES)

"""When a backward pass hands on what it has."""

from __future__ import annotations

import pytest
import torch

from shardwright.core.torch_internals.tensors import (
    FakeTensorMode,
    prioritize_gradient,
    runs_in_backward_pass,
    without_checks_of_fake_tensors,
)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_gradient_handed_on_at_once_does_not_wait_for_what_was_made_later(at_once: bool) -> None:
    order: list[str] = []
    x, weight = (torch.ones(2, requires_grad=True) for _ in range(2))
    cast = weight.to(torch.bfloat16)
    if at_once:
        assert prioritize_gradient(cast) is cast
    weight.register_post_accumulate_grad_hook(lambda _: order.append("weight"))
    before = x.exp()
    before.register_hook(lambda _: order.append("x"))
    for _ in range(2):
        (before.to(torch.bfloat16) * cast).sum().backward(retain_graph=True)
    assert order == (["weight", "x"] if at_once else ["x", "weight"]) * 2
    assert torch.equal(weight.grad, 2 * before.detach().to(torch.bfloat16).float())


def test_leaves_and_tensors_without_a_gradient_are_left_alone() -> None:
    for tensor in (torch.ones(1), torch.ones(1, requires_grad=True)):
        assert prioritize_gradient(tensor) is tensor


def test_checks_of_values_pass_for_fake_tensors_only() -> None:
    with FakeTensorMode():
        fake = torch.ones(2) > 3
    with without_checks_of_fake_tensors():
        torch._check_tensor_all(fake)
        with pytest.raises(RuntimeError):
            torch._check_tensor_all(torch.ones(2) > 3)


@pytest.mark.parametrize("to", ["all", "x"])
def test_a_node_that_the_results_do_not_depend_on_does_not_run_in_their_backward_pass(
    to: str,
) -> None:
    x, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    nodes = [x.view_as(x).grad_fn, unused.view_as(unused).grad_fn]
    used = x.view_as(x)
    result = used.exp().sum()
    runs: list[bool] = []
    result.register_hook(
        lambda _: runs.extend(map(runs_in_backward_pass, [used.grad_fn, *nodes]))  # type: ignore[arg-type]
    )
    result.backward() if to == "all" else torch.autograd.grad(result, x)
    assert runs == [True, False, False]

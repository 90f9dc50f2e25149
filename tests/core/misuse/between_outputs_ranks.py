"""What `test_between_outputs.py` runs on every rank: gradients between outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from torchrun import run_checks

Outputs = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.aside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Outputs:
        hidden = self.trunk(x).tanh()
        logits = self.head(hidden)
        return {
            "nested": [hidden, {"logits": logits}],
            "aside": self.aside(hidden.detach()),
            "part": hidden[:, :2],
            "loss": self.last(logits).square().mean(),
        }


class NoLoss(Net):
    """Its outputs are returned whole."""

    def forward(self, x: Tensor) -> Outputs:
        outputs = super().forward(x)
        return outputs | {"loss": outputs["loss"].reshape(1)}


def batch() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hidden(outputs: Outputs) -> Tensor:
    tensor: Tensor = outputs["nested"][0]
    return tensor


def logits(outputs: Outputs) -> Tensor:
    tensor: Tensor = outputs["nested"][1]["logits"]
    return tensor


def both(outputs: Outputs) -> Tensor:
    """What depends on the loss and, outside of the model, on what it is computed from."""
    loss: Tensor = 2 * outputs["loss"].sum() + whole(hidden(outputs)).square().mean()
    return loss


def retained(outputs: Outputs) -> Any:
    hidden(outputs).retain_grad()
    outputs["loss"].sum().backward()
    return hidden(outputs).grad


def retained_of_part(outputs: Outputs) -> Any:
    hidden(outputs).retain_grad()
    whole(outputs["part"]).sum().backward()
    return hidden(outputs).grad


def hooked(outputs: Outputs) -> Any:
    found: list[Any] = []
    logits(outputs).register_hook(found.append)  # type: ignore[no-untyped-call]
    both(outputs).backward()
    return found[0]


def hooked_and_dropped(outputs: Outputs) -> Any:
    found: list[Any] = []
    loss = outputs["loss"].sum()
    outputs.pop("nested")[0].register_hook(found.append)
    loss.backward()
    return found[0]


def hooked_with_others(outputs: Outputs) -> Any:
    found: list[Any] = []
    register_multi_grad_hook([hidden(outputs), logits(outputs)], found.extend)
    outputs["loss"].sum().backward()
    return found[0]


def hooked_node(outputs: Outputs) -> Any:
    found: list[Any] = []
    node: Any = hidden(outputs).grad_fn
    node.register_prehook(lambda gradients: found.extend(gradients))
    outputs["loss"].sum().backward()
    return found[0]


def of_edge(outputs: Outputs) -> Any:
    edge = get_gradient_edge(hidden(outputs))
    return torch.autograd.grad(outputs["loss"].sum(), edge, allow_unused=True)[0]


def by_inputs(outputs: Outputs) -> Any:
    both(outputs).backward(inputs=[hidden(outputs)])
    return hidden(outputs).grad


BETWEEN: dict[str, tuple[str, Callable[[Outputs], Any]]] = {
    "retain_grad": ("`retain_grad` on output['nested'][0]", retained),
    "a view": ("`retain_grad` on output['nested'][0]", retained_of_part),
    "hook": ("`register_hook` of list.append on output['nested'][1]['logits']", hooked),
    "dropped": ("`register_hook` of list.append on output['nested'][0]", hooked_and_dropped),
    "several": ("`register_hook` of register_multi_grad_hook", hooked_with_others),
    "node": ("`grad_fn.register_prehook` of hooked_node", hooked_node),
    "grad": (
        "`torch.autograd.grad`",
        lambda o: torch.autograd.grad(o["loss"].sum(), logits(o), allow_unused=True)[0],
    ),
    "grad of both": ("`torch.autograd.grad`", lambda o: torch.autograd.grad(both(o), hidden(o))[0]),
    "edge": ("`torch.autograd.grad`", of_edge),
    "inputs": ("`torch.autograd.grad`", by_inputs),
}


def own_retained(outputs: Outputs) -> Any:
    hidden(outputs).retain_grad()
    whole(hidden(outputs)).square().sum().backward()
    return hidden(outputs).grad


def own_by_inputs(outputs: Outputs) -> Any:
    whole(hidden(outputs)).square().sum().backward(inputs=[hidden(outputs)])
    return hidden(outputs).grad


def loss_hooked(outputs: Outputs) -> Any:
    found: list[Any] = []
    outputs["loss"].register_hook(lambda gradient: (found.append(gradient), 2 * gradient)[1])
    (3 * outputs["loss"].sum()).backward()
    return found[0]


def aside_hooked(outputs: Outputs) -> Any:
    """The hook changes a gradient that comes from outside alone."""
    found: list[Any] = []
    outputs["aside"].register_hook(lambda gradient: (found.append(gradient), 2 * gradient)[1])
    (whole(outputs["aside"]).square().sum() + outputs["loss"].sum()).backward()
    return found[0]


def hook_removed(outputs: Outputs) -> Any:
    handle: Any = hidden(outputs).register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    handle.remove()
    both(outputs).backward()
    return outputs["loss"]


APART: dict[str, Callable[[Outputs], Any]] = {
    "outside": own_retained,
    "outside inputs": own_by_inputs,
    "outside grad": lambda o: torch.autograd.grad(o["nested"][0].square().sum(), o["nested"][0])[0],
    "loss": loss_hooked,
    "aside": aside_hooked,
    "removed": hook_removed,
}
"""Where no gradient is missing."""


def planned(make: type[Net], mode: str) -> tuple[nn.Module, nn.Module]:
    net, eager = make().double(), make().double()
    return sw.parallelize(net, sw.plan(net, (batch(),), devices=2, mode=mode), copy=True), eager


def compare(use: Callable[[Outputs], Any], parallel: nn.Module, eager: nn.Module) -> None:
    """What `use` returns, and the gradients of parameters."""
    results = []
    for module in (parallel, eager):
        module.zero_grad()
        results.append(use(module(batch())))
    torch.testing.assert_close(whole(results[0]), whole(results[1]))
    for name, parameter in parallel.named_parameters():
        wanted = eager.get_parameter(name).grad
        assert (parameter.grad is None) == (wanted is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(whole(parameter.grad), wanted, msg=name)


def check_gradients_between_outputs_are_refused() -> None:
    for make in (Net, NoLoss):
        parallel, _ = planned(make, "data_parallel")
        for name, (call, use) in BETWEEN.items():
            try:
                use(parallel(batch()))
            except sw.PlanError as error:
                for part in (call, "between_outputs_ranks.py:", "is computed from it", "outside"):
                    assert part in str(error), (make, name, part, error)
                assert str(error).count("\n") == 1
            else:
                raise AssertionError(f"{make.__name__}: {name} was incomplete")


def check_gradients_of_outputs_that_are_apart_are_those_of_eager() -> None:
    for make in (Net, NoLoss):
        parallel, eager = planned(make, "data_parallel")
        for use in APART.values():
            compare(use, parallel, eager)


def check_outputs_that_are_returned_as_computed_have_all_of_their_gradient() -> None:
    parallel, eager = planned(Net, "stand_alone")
    for use in (*(use for _, use in BETWEEN.values()), *APART.values()):
        compare(use, parallel, eager)


CHECKS = (
    check_gradients_between_outputs_are_refused,
    check_gradients_of_outputs_that_are_apart_are_those_of_eager,
    check_outputs_that_are_returned_as_computed_have_all_of_their_gradient,
)


if __name__ == "__main__":
    run_checks(CHECKS)

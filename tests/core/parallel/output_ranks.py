"""What `test_module_outputs.py` runs on every rank: several outputs, trained in many ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributions import Categorical
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from random_plans import random_plan
from shardwright.core.misuse.planned_parameters import FIRST_CALLS, PARTS
from torchrun import run_checks

Outputs = dict[str, Any]
Train = Callable[[Outputs], None]


class ActorCritic(nn.Module):
    """A policy and value model with a loss, and outputs of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.policy = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16)
        self.value = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, actions: Tensor) -> Outputs:
        hidden = torch.tanh(self.trunk(x))
        logits = self.policy(hidden)
        values = self.value(self.norm(hidden)) * self.scale
        return {
            "entropy": -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
            "values": values,
            "loss": F.cross_entropy(logits, actions),
            "logits": logits,
            "again": values,
            "scale": self.scale,
            "x": x,
            "best": logits.argmax(-1),
        }


class Losses(ActorCritic):
    """Returns two losses, neither under the key 'loss'."""

    def forward(self, x: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x, actions)
        return outputs["loss"], outputs["values"].square().mean()


class NoLoss(ActorCritic):
    def forward(self, x: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        outputs = super().forward(x, actions)
        return outputs["logits"], outputs["values"], self.scale


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 8, (8,), generator=generator)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everything(outputs: Outputs) -> None:
    numbers = outputs["loss"] + 0.1 * outputs["entropy"] + whole(outputs["values"]).cos().sum()
    (
        numbers + whole(outputs["logits"]).sin().mean() + whole(outputs["scale"]).exp().sum()
    ).backward()


def in_turn(outputs: Outputs) -> None:
    outputs["loss"].backward(retain_graph=True)
    whole(outputs["values"]).square().mean().backward(retain_graph=True)
    (outputs["entropy"] + outputs["loss"]).backward()


TRAINED: dict[str, Train] = {
    "the loss": lambda o: o["loss"].backward(),
    "a metric": lambda o: o["entropy"].backward(),
    "numbers together": lambda o: (o["loss"] - 0.1 * o["entropy"]).backward(),
    "an own loss of whole logits": lambda o: whole(o["logits"]).cos().mean().backward(),
    "an own loss of DTensors": lambda o: whole((o["values"] * o["again"]).mean()).backward(),
    "a part of the values": lambda o: whole(o["values"])[:3, 1].sum().backward(),
    "loss and values": lambda o: (o["loss"] + whole(o["values"]).square().mean()).backward(),
    "a parameter that is returned": lambda o: whole(o["scale"]).square().sum().backward(),
    "everything": everything,
    "one after the other": in_turn,
}


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make().double())
    return nets[0], nets[1]


def plans(net: nn.Module) -> list[sw.Plan]:
    """Plans with ZeRO, with ZeRO and recomputation, and two random plans."""
    level3 = {"level": "level3", "threshold": 0}
    made = [sw.plan(net, batch(), devices=4, hsdp=level3)]
    for module in net.children():
        sw.recompute(module)
    made.append(sw.plan(net, batch(), devices=4, mem_coeff=10.0, hsdp=level3))
    graph = sw.capture(net, batch())
    return made + [random_plan(graph, 4, seed) for seed in range(2)]


def compare(parallel: nn.Module, net: nn.Module, name: str) -> None:
    """Gradients by name; None for parameters without."""
    for path, parameter in parallel.named_parameters():
        wanted = net.get_parameter(path).grad
        assert (parameter.grad is None) == (wanted is None), (name, path)
        if wanted is not None:
            torch.testing.assert_close(whole(parameter.grad), wanted, msg=f"{name}: {path}")


def check_any_outputs_may_be_trained() -> None:
    for plan in plans(built(ActorCritic)[0]):
        net, other = built(ActorCritic)
        parallel = sw.parallelize(net, plan, copy=True)
        for name, train in TRAINED.items():
            for module in (parallel, other):
                module.zero_grad()
                train(module(*batch()))
            compare(parallel, other, name)


def check_outputs_trained_by_turns_with_an_optimizer() -> None:
    """Weight decay and momentum do not change parameters without gradient."""
    for plan in plans(built(ActorCritic)[0])[::2]:
        net, other = built(ActorCritic)
        parallel = sw.parallelize(net, plan, copy=True)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (parallel, other)]
        for train in TRAINED.values():
            for module, optimizer in zip((parallel, other), optimizers, strict=True):
                optimizer.zero_grad()
                train(module(*batch()))
                optimizer.step()
        for path, parameter in parallel.named_parameters():
            torch.testing.assert_close(whole(parameter), other.get_parameter(path))


def check_several_losses_and_none() -> None:
    for make in (Losses, NoLoss):
        for plan in plans(built(make)[0])[::2]:
            net, other = built(make)
            parallel = sw.parallelize(net, plan, copy=True)
            for chosen in ((0,), (1,), (0, 1)):
                for module in (parallel, other):
                    module.zero_grad()
                    outputs = module(*batch())
                    sum(outputs[n].square().sum() for n in chosen).backward()  # type: ignore[union-attr]
                compare(parallel, other, f"{make.__name__} {chosen}")


def check_gradients_of_inputs() -> None:
    """An input requires a gradient, as the output of another model does, unlike in the plan."""
    for plan in plans(built(ActorCritic)[0])[::3]:
        net, other = built(ActorCritic)
        parallel = sw.parallelize(net, plan, copy=True)
        gradients = []
        for module in (parallel, other):
            x, actions = batch()
            x.requires_grad_()
            everything(module(x, actions))
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[0], gradients[1])


def check_a_step_of_several_losses_is_refused() -> None:
    net, _ = built(Losses)
    for call in (
        lambda: sw.plan(net, batch(), devices=4, micro_batches=2),
        lambda: sw.parallelize(net, sw.plan(net, batch(), devices=4), copy=True).train_step(
            *batch()
        ),
    ):
        try:
            call()
        except sw.PlanError as error:
            assert "trains one loss, but the model returns 2 scalars" in str(error), error
        else:
            raise AssertionError("one of two losses was trained")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))
        self.last = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        hidden = (x + 1j * self.phase) @ self.first
        return (hidden * hidden.conj() @ self.last).abs().mean()


def check_complex_parameters() -> None:
    """Reductions and exchanges of complex numbers, which not every backend supports."""
    for plan in plans(built(Complex)[0]):
        net, other = built(Complex)
        parallel = sw.parallelize(net, plan, copy=True)
        for module in (parallel, other):
            module(*batch()).backward()
        compare(parallel, other, "complex")


def check_a_backward_pass_never_uses_values_that_were_changed_after_forward() -> None:
    """Raises like autograd; gathered parameters are copies, and unchanged."""
    refused = 0
    for plan in plans(built(ActorCritic)[0]):
        net, other = built(ActorCritic)
        parallel = sw.parallelize(net, plan, copy=True)
        loss = parallel(*batch())["loss"]
        parallel(*batch())
        other(*batch())["loss"].backward()
        with torch.no_grad():
            for module in (parallel, other):
                module.policy.weight.mul_(0.5)
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
            refused += 1
        else:
            compare(parallel, other, "the values of forward")
        for module in (parallel, other):
            module.zero_grad()
            everything(module(*batch()))
        compare(parallel, other, "the changed values")
    assert refused


def check_replaced_data_of_a_dtensor_is_refused() -> None:
    for calls_before in (1, 12):
        net, _ = built(ActorCritic)
        parallel = sw.parallelize(net, sw.plan(net, batch(), devices=4), copy=True)
        parallel.policy.weight.data.mul_(0.5)
        for _ in range(calls_before):
            parallel(*batch())
        torch.Tensor.data.__set__(parallel.policy.weight, parallel.policy.weight.data * 0.5)
        calls_until_seen = 1 if calls_before < FIRST_CALLS else PARTS
        try:
            for _ in range(calls_until_seen):
                parallel(*batch())
        except sw.PlanError as error:
            assert "`.data` of parameter 'policy.weight' was replaced" in str(error), error
        else:
            raise AssertionError("the old values were used")


LABELS = torch.arange(8) % 4
MEET: dict[str, Callable[[Outputs], Tensor]] = {
    "right": lambda o: (o["values"].argmax(-1) == LABELS).double().mean() + o["loss"],
    "cross entropy": lambda o: F.cross_entropy(o["logits"], LABELS),
    "a factor before": lambda o: (batch()[0] * o["logits"]).sin().sum(),
    "chosen": lambda o: o["logits"][torch.arange(8), LABELS].square().sum() + o["loss"],
    "masked": lambda o: o["logits"][batch()[0] > 0].exp().sum(),
    "a list": lambda o: torch.cat([o["values"], torch.ones(1, 4)]).square().sum(),
    "numpy": lambda o: o["loss"] * o["values"].detach().cpu().numpy().sum(),
    "an array": lambda o: o["loss"] * float(numpy.asarray(o["values"].detach()).max()),
    "numbers": lambda o: o["loss"] * o["values"].sum().item() + o["values"].tolist()[3][1],
    "an operator that DTensors lack": lambda o: torch.cdist(o["values"], o["values"]).sum(),
    "a distribution": lambda o: -Categorical(logits=o["logits"]).log_prob(LABELS).mean(),
    "a gradient given": lambda o: (o["logits"].backward(batch()[0], retain_graph=True), o["loss"])[
        1
    ],
    "written into another": lambda o: batch()[0].index_put_((LABELS,), o["logits"]).square().sum(),
    "a whole parameter": lambda o: o["loss"] + (whole(o["scale"]) * torch.arange(4)).sum(),
}


def check_outputs_in_parts_meet_ordinary_tensors() -> None:
    in_parts = set()
    for plan in plans(built(ActorCritic)[0]):
        net, other = built(ActorCritic)
        parallel = sw.parallelize(net, plan, copy=True)
        for name, meet in MEET.items():
            losses = []
            for module in (parallel, other):
                module.zero_grad()
                losses.append(meet(module(*batch())))
                losses[-1].backward()
            torch.testing.assert_close(whole(losses[0].detach()), losses[1].detach(), msg=name)
            compare(parallel, other, name)
        in_parts |= {key for key, y in parallel(*batch()).items() if isinstance(y, DTensor)}
    assert {"values", "logits"} <= in_parts


def check_outputs_in_parts_are_not_changed_by_ordinary_tensors() -> None:
    net, _ = built(ActorCritic)
    outputs = sw.parallelize(
        net, sw.plan(net, batch(), devices=4, mode="data_parallel"), copy=True
    )(*batch())
    logits, ones = outputs["logits"], torch.ones(8, 8)
    changes: list[Callable[[], Any]] = [
        lambda: logits.add_(ones),
        lambda: logits.__setitem__(0, ones[0]),
        lambda: torch.add(ones, ones, out=logits.detach()),
    ]
    for change in changes:
        try:
            change()
        except sw.PlanError as error:
            assert "compute a new tensor instead" in str(error), error
        else:
            raise AssertionError("a gathered copy was changed")


CHECKS = (
    check_outputs_in_parts_meet_ordinary_tensors,
    check_outputs_in_parts_are_not_changed_by_ordinary_tensors,
    check_a_backward_pass_never_uses_values_that_were_changed_after_forward,
    check_replaced_data_of_a_dtensor_is_refused,
    check_a_step_of_several_losses_is_refused,
    check_any_outputs_may_be_trained,
    check_outputs_trained_by_turns_with_an_optimizer,
    check_several_losses_and_none,
    check_gradients_of_inputs,
    check_complex_parameters,
)


if __name__ == "__main__":
    run_checks(CHECKS)

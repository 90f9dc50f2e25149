"""Programs whose models return more than one loss, or use gradients in other ways."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.program import (
    STEPS,
    WIDTH,
    Classifier,
    Parallel,
    Training,
    batch,
    number,
    program,
    trained,
)


class TwoLosses(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.hidden(x)
        return F.cross_entropy(self.second(hidden), y), hidden.square().mean()


@program
def two_losses_are_summed(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first, second = net(x, y)
        return first + 0.5 * second

    return trained(parallel(TwoLosses(), *batch()), loss_of)


@program
def only_the_second_loss_is_trained(parallel: Parallel) -> Training:
    return trained(parallel(TwoLosses(), *batch()), lambda net, x, y: net(x, y)[1])


@program
def losses_take_turns(parallel: Parallel) -> Training:
    net, turns = parallel(TwoLosses(), *batch()), itertools.cycle((0, 1))
    adam = torch.optim.Adam(net.parameters())
    return trained(net, lambda net, x, y: net(x, y)[next(turns)], adam, steps=range(4))


@program
def each_loss_runs_backward_of_its_own(parallel: Parallel) -> Training:
    net = parallel(TwoLosses(), *batch())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        first, second = net(*batch(step))
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield number(first)
    return net


class Named(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.hidden(x)
        logits = self.second(hidden)
        penalty = hidden.abs().mean()
        accuracy = (logits.argmax(-1) == y).float().mean()
        return {
            "penalty": penalty,
            "accuracy": accuracy,
            "logits": logits,
            "loss": F.cross_entropy(logits, y),
        }


@program
def a_dictionary_with_the_loss_last(parallel: Parallel) -> Training:
    return trained(parallel(Named(), *batch()), lambda net, x, y: net(x, y)["loss"])


@program
def a_penalty_beside_the_loss(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = net(x, y)
        return output["loss"] + 0.3 * output["penalty"]

    return trained(parallel(Named(), *batch()), loss_of)


@program
def logits_with_a_loss_outside(parallel: Parallel) -> Training:
    net = parallel(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)), batch()[0])
    return trained(net, lambda net, x, y: F.cross_entropy(net(x), y))


class ActorCritic(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.second(hidden), self.value(hidden).squeeze(-1)


@program
def actor_and_critic(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, values = net(x)
        advantage = (y.float() - values).detach()
        chosen = F.log_softmax(logits, -1).gather(1, y[:, None])[:, 0]
        return -(chosen * advantage).mean() + F.mse_loss(values, y.float())

    return trained(parallel(ActorCritic(), batch()[0]), loss_of)


@program
def a_model_called_twice_a_step(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return net(x, y) + net(2 * x, y)

    return trained(parallel(Classifier(), *batch()), loss_of)


@program
def the_gradient_of_an_input(parallel: Parallel) -> Training:
    net = parallel(Classifier(), batch()[0].requires_grad_(), batch()[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        x.requires_grad_()
        net(x, y).backward()
        assert x.grad is not None
        yield number(x.grad.abs().sum())
        loss = net((x + 0.1 * x.grad.sign()).detach().requires_grad_(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield number(loss)
    return net


@program
def gradients_by_autograd_grad(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    for step in range(STEPS):
        loss = net(*batch(step))
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        yield number(loss)
    return net


@program
def a_penalty_on_gradients(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = net(x, y)
        gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        squares = [gradient.square().sum() for gradient in gradients]
        return loss + 0.1 * sum(squares[1:], squares[0])

    return trained(parallel(Classifier(), *batch()), loss_of)

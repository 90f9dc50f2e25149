"""Programs with hooks."""

from __future__ import annotations

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
    call,
    number,
    program,
    trained,
)


@program
def a_hook_of_a_parameter_before_planning(parallel: Parallel) -> Training:
    net = Classifier()
    net.first.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    return trained(parallel(net, *batch()), call)


@program
def a_hook_of_a_parameter_after_planning(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    dict(net.named_parameters())["first.weight"].register_hook(lambda gradient: 2 * gradient)
    return trained(net, call)


@program
def an_optimizer_within_backward(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def update(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        loss = net(*batch(step))
        loss.backward()
        yield number(loss)
    return net


@program
def a_forward_hook_before_planning(parallel: Parallel) -> Training:
    net = Classifier()
    net.first.register_forward_hook(lambda module, args, output: 2 * output)
    return trained(parallel(net, *batch()), call)


@program
def a_forward_hook_after_planning(parallel: Parallel) -> Training:
    plain = Classifier()
    net = parallel(plain, *batch())
    inner = dict(net.named_modules()).get("first", plain.first)
    inner.register_forward_hook(lambda module, args, output: 2 * output)
    return trained(net, call)


@program
def a_forward_hook_is_removed_on_the_way(parallel: Parallel) -> Training:
    net = Classifier()
    handle = net.first.register_forward_hook(lambda module, args, output: 2 * output)
    net = parallel(net, *batch())
    yield from trained(net, call)
    handle.remove()
    return (yield from trained(net, call))


@program
def hooks_of_parameters_that_forward_changes(parallel: Parallel) -> Training:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WIDTH, 16, max_norm=1.0)
            self.head = nn.Linear(16, WIDTH)
            self.mean = nn.Linear(16, WIDTH).requires_grad_(False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.weight.mul_(0.9).add_(self.head.weight, alpha=0.1)
                self.head.weight.clamp_(-0.2, 0.2)
            logits = self.head(self.words(y))
            drawn = F.mse_loss(logits, self.mean(self.words(y)))
            return F.cross_entropy(logits + x, y) + drawn

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    net = Words()
    net.words.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    net = parallel(net, *batch())
    dict(net.named_parameters())["words.weight"].register_post_accumulate_grad_hook(halve)
    return (yield from trained(net, call))


@program
def a_backward_hook_of_a_module(parallel: Parallel) -> Training:
    net = Classifier()
    net.second.register_full_backward_hook(lambda module, grad_in, grad_out: (2 * grad_in[0],))
    return trained(parallel(net, *batch()), call)

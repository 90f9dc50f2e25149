"""Programs with hooks."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.programs.program import (
    STEPS,
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
def a_backward_hook_of_a_module(parallel: Parallel) -> Training:
    net = Classifier()
    net.second.register_full_backward_hook(lambda module, grad_in, grad_out: (2 * grad_in[0],))
    return trained(parallel(net, *batch()), call)

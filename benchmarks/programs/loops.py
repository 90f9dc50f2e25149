"""Training loops that do more than step."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.program import (
    BATCH,
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
def layers_are_unfrozen_on_the_way(parallel: Parallel) -> Training:
    net = Classifier()
    net.first.requires_grad_(False)
    net = parallel(net, *batch())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    yield from trained(net, call, optimizer, steps=(0, 1))
    net.requires_grad_(True)
    return (yield from trained(net, call, optimizer, steps=(2, 3)))


@program
def gradients_accumulate_and_are_clipped(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(STEPS):
        for half in range(2):
            loss = net(*batch(2 * step + half)) / 2
            loss.backward()
            yield number(loss)
        yield number(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return net


@program
def weights_decay_by_hand_and_averages_are_kept(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    averages = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in trained(net, call):
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.mul_(0.99)
                averages[name].lerp_(parameter, 0.1)
        yield number(sum((a.abs().sum() for a in averages.values()), torch.zeros(())))
    return net


@program
def evaluation_and_a_smaller_last_batch(parallel: Parallel) -> Training:
    class WithDropout(Classifier):
        def hidden(self, x: Tensor) -> Tensor:
            return F.dropout(super().hidden(x), 0.0 if self.training else 0.5, self.training)

    net = parallel(WithDropout(), *batch())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for size in (BATCH, BATCH, 8):
        loss = net(*batch(size, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            yield number(net(*batch(7)))
        net.train()
    return net


@program
def evaluation_in_inference_mode(parallel: Parallel) -> Training:
    """Before the first step, too, of batches that are made in it."""
    net = parallel(Classifier(), *batch())
    for step in range(STEPS):
        net.eval()
        with torch.inference_mode():
            yield number(net(*batch(7)))
            yield number(net(*batch(7, 8)))
        net.train()
        # The program of the evaluation is trained, too.
        for size in (BATCH, 8):
            loss = net(*batch(step, size))
            loss.backward()
            yield number(loss)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(0.1 * parameter.grad)
        net.zero_grad()
    return net


@program
def a_state_is_loaded_on_the_way(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    start = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    yield from trained(net, call)
    net.load_state_dict(start)
    yield number(net(*batch()))
    return (yield from trained(net, call))


@program
def a_graph_is_kept_over_a_step(parallel: Parallel) -> Training:
    """Autograd refuses to use the weights of after the step for the gradients of before."""
    net = parallel(Classifier(), *batch())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = net(*batch())
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError:
        return (yield from trained(net, call))
    yield float("nan")
    return net


@program
def weights_are_scaled_by_data(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    for _ in trained(net, call):
        for parameter in net.parameters():
            parameter.data.mul_(0.9)
    return (yield from trained(net, call))


@program
def data_of_weights_are_replaced(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    for _ in trained(net, call):
        for parameter in net.parameters():
            parameter.data = parameter.data * 0.9
    return (yield from trained(net, call))


@program
def a_layer_is_parametrized_after_planning(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    torch.nn.utils.parametrizations.weight_norm(net.first)
    return trained(net, call)


@program
def each_rank_has_a_seed_of_its_own(parallel: Parallel) -> Training:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return trained(parallel(Classifier(), *batch()), call)


@program
def each_rank_has_a_batch_of_its_own(parallel: Parallel) -> Training:
    """As `DistributedSampler` gives it, without `dataset_strategy`."""
    net = parallel(Classifier(), *batch())
    first = 10 * dist.get_rank() if dist.is_initialized() else 0
    return trained(net, call, steps=range(first, first + STEPS))

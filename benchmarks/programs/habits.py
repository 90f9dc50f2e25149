"""What many a training script does in passing."""

from __future__ import annotations

import random
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
    call,
    number,
    program,
    trained,
)


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@program
def two_optimizers_take_turns(parallel: Parallel) -> Training:
    net: Any = parallel(Classifier(), *batch())
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (net.first, net.second)]
    for step in range(4):
        loss = net(*batch(step))
        net.zero_grad()
        loss.backward()
        optimizers[step % 2].step()
        yield number(loss)
    return net


@program
def lbfgs_with_a_closure(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(*batch())
        loss.backward()
        return loss

    for _ in range(2):
        yield number(optimizer.step(closure))
    return net


@program
def a_schedule_that_follows_the_loss(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = _sgd(net)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
    for loss in trained(net, call, optimizer, range(5)):
        schedule.step(loss)
        yield optimizer.param_groups[0]["lr"]
    return net


class TiedLater(Classifier):
    """Embedding and head are one parameter, which is assigned after both were made."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.second.weight = self.head.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return F.cross_entropy(self.head(hidden) + self.second(hidden), y)


@program
def a_weight_is_shared_after_construction(parallel: Parallel) -> Training:
    return trained(parallel(TiedLater(), *batch()), call)


class TiedByCall(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        back = F.linear(self.hidden(x), self.first.weight.t())
        return F.cross_entropy(back, y) + F.mse_loss(back, x)


@program
def a_weight_is_used_transposed(parallel: Parallel) -> Training:
    return trained(parallel(TiedByCall(), *batch()), call)


@program
def the_state_of_the_optimizer_is_changed(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    yield from trained(net, call, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["step"].fill_(1)
    yield from trained(net, call, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    return (yield from trained(net, call, optimizer))


class SometimesShallow(Classifier):
    """Stochastic depth by Python's own generator."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.training or random.random() < 0.5:
            x = x + self.second(self.hidden(x))
        return F.cross_entropy(self.second(self.hidden(x)), y)


@program
def depth_is_drawn_by_python(parallel: Parallel) -> Training:
    random.seed(3)
    return trained(parallel(SometimesShallow(), *batch()), call, steps=range(8))


class Branching(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            return F.cross_entropy(self.second(self.hidden(x)), y)
        return F.cross_entropy(self.second(self.hidden(-x)), y)


@program
def a_branch_on_data(parallel: Parallel) -> Training:
    return trained(parallel(Branching(), *batch()), call, steps=range(6))


class Counting(Classifier):
    """The loss of even calls is another than that of odd ones."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        logits = self.second(self.hidden(x))
        smooth = F.cross_entropy(logits, y, label_smoothing=0.2)
        return torch.where(self.calls % 2 == 0, smooth, F.cross_entropy(logits, y)) / self.calls


@program
def a_buffer_counts_calls(parallel: Parallel) -> Training:
    return trained(parallel(Counting(), *batch()), call, steps=range(4))


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2 * WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.first(x)))


@program
def the_momentum_of_a_norm_is_scheduled(parallel: Parallel) -> Training:
    net: Any = parallel(Normed(), *batch())
    for step, loss in enumerate(trained(net, call, steps=range(4))):
        yield loss
        net.norm.momentum = 0.5 / (step + 1)
        if step == 2:
            net.norm.eval()
    return net


@program
def gradients_are_scaled_and_noisy(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = _sgd(net)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        (net(*batch(step)) * 0.125).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(8.0)
            parameter.grad += 0.01 * torch.randn((), generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield number(net(*batch(step)))
    return net


@program
def weights_are_constrained_after_each_step(parallel: Parallel) -> Training:
    """To the unit ball, row by row."""
    net: Any = parallel(Classifier(), *batch())
    for loss in trained(net, call):
        yield loss
        with torch.no_grad():
            net.first.weight.div_(net.first.weight.norm(dim=1, keepdim=True).clamp(min=1.0))
            net.second.weight.clamp_(-0.2, 0.2)
    return net


class Sampled(Classifier):
    """A softmax over the true class and a few that are drawn."""

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor) -> Tensor:
        classes = torch.cat([y[:, None], negatives.expand(len(y), -1)], 1)
        logits = torch.einsum("bh,bch->bc", self.hidden(x), self.second.weight[classes])
        return F.cross_entropy(logits, torch.zeros_like(y))


@program
def a_sampled_softmax(parallel: Parallel) -> Training:
    negatives = torch.randint(WIDTH, (4,), generator=torch.Generator().manual_seed(0))
    net = parallel(Sampled(), *batch(), negatives)
    return trained(net, lambda net, x, y: net(x, y, negatives))


@program
def models_in_a_model(parallel: Parallel) -> Training:
    """Only a part of what is trained was planned."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = parallel(Classifier(), *batch()), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner(x, y) * self.scale + (self.scale - 2.0).square()

    return trained(Scaled(), call)


class Detached(Classifier):
    """A straight-through estimator, and a target without gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(x)
        hard = hidden + (hidden.sign() - hidden).detach()
        return F.cross_entropy(self.second(hard), y) + F.mse_loss(
            self.second(hidden), self.second(hard).detach()
        )


@program
def detached_parts(parallel: Parallel) -> Training:
    return trained(parallel(Detached(), *batch()), call)


@program
def the_loss_decides_whether_to_step(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = _sgd(net)
    best = float("inf")
    for step in range(5):
        loss = net(*batch(step))
        if loss < best:
            best = loss.item()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        yield float(loss)
    return net


@program
def a_row_of_each_weight_stays_zero(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = _sgd(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(*batch(step))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter[0].zero_()
        yield number(loss)
    return net


@program
def gradients_of_a_row_are_left_out(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = _sgd(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(*batch(step))
        loss.backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad[:2].zero_()
        optimizer.step()
        yield number(loss)
    return net

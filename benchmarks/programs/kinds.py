"""Kinds of training beside a classifier's: several models, losses of the user's own, weights that
are read and changed in between."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.program import (
    BATCH,
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


def _layers(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@program
def a_generator_against_a_critic(parallel: Parallel) -> Training:
    maker = parallel(_layers(4), _drawn(0, BATCH, 4))
    critic = parallel(_layers(outputs=1), batch()[0])
    of_maker = torch.optim.Adam(maker.parameters(), 0.01, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), 0.01)
    yes, no = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    for step in range(STEPS):
        made = maker(_drawn(step, BATCH, 4))
        real = F.binary_cross_entropy_with_logits(critic(batch(step)[0]), yes)
        loss = real + F.binary_cross_entropy_with_logits(critic(made.detach()), no)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        yield number(loss)
        loss = F.binary_cross_entropy_with_logits(critic(made), yes)
        of_maker.zero_grad()
        loss.backward()
        of_maker.step()
        yield number(loss)
    return nn.ModuleList([maker, critic])


@program
def a_student_of_a_planned_teacher(parallel: Parallel) -> Training:
    teacher = parallel(_layers().requires_grad_(False).eval(), batch()[0])

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2, -1)
        logits = net(x)
        drawn = F.kl_div(F.log_softmax(logits / 2, -1), wanted, reduction="batchmean")
        return 4 * drawn + F.cross_entropy(logits, y)

    return trained(parallel(_layers(), batch()[0]), loss_of)


class Queue(nn.Module):
    """Momentum contrast: negatives are the keys of earlier batches, which a buffer holds."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = _layers()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(2 * BATCH, WIDTH), dim=1))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            pairs = zip(self.key.parameters(), self.query.parameters(), strict=True)
            for mean, parameter in pairs:
                mean.mul_(0.9).add_(parameter, alpha=0.1)
            key = F.normalize(self.key(other), dim=1)
        same = (query * key).sum(1, keepdim=True)
        logits = torch.cat([same, query @ self.queue.clone().t()], 1) / 0.2
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[len(x) :], key]))
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64))


@program
def a_queue_of_keys_in_a_buffer(parallel: Parallel) -> Training:
    net = parallel(Queue(), batch()[0], batch()[0])
    return trained(net, lambda net, x, y: net(x, x + 0.1), steps=range(4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, state: Tensor) -> Any:
        state = self.cell(x, state)
        return F.cross_entropy(self.head(state), y), state


@program
def a_state_goes_from_call_to_call(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss, state = net(x, y, torch.zeros(BATCH, WIDTH))
        return loss + net(x, y, state)[0]

    return trained(parallel(Recurrent(), *batch(), torch.zeros(BATCH, WIDTH)), loss_of)


class WithLogits(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.second(self.hidden(x))
        return F.cross_entropy(logits, y), logits


@program
def metrics_of_logits(parallel: Parallel) -> Training:
    net = parallel(WithLogits(), *batch())
    seen = []

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss, logits = net(x, y)
        seen.append((logits.argmax(-1) == y).float().mean())
        seen.append(torch.as_tensor(logits.detach().numpy().max()))
        return loss + F.smooth_l1_loss(logits, x)

    for loss in trained(net, loss_of):
        yield loss
        yield from map(number, seen)
    return net


@program
def own_losses_with_weights_of_their_own(parallel: Parallel) -> Training:
    """And a penalty on the parameters of the model, by one of them."""
    net = parallel(_layers(), batch()[0])
    scale, weights = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(2))

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = net(x)
        losses = torch.stack([F.cross_entropy(logits * scale, y), F.mse_loss(logits, x)])
        penalty = sum(p.square().sum() for p in net.parameters())
        return ((-weights).exp() * losses + weights).sum() + 0.01 * scale * penalty

    optimizer = torch.optim.SGD([*net.parameters(), scale, weights], 0.05, momentum=0.9)
    yield from trained(net, loss_of, optimizer)
    yield from (number(scale), number(weights.sum()))
    return net


@program
def a_penalty_with_ordinary_tensors(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first = net.get_parameter("first.weight")
        return net(x, y) + (first.t() @ first - torch.eye(WIDTH)).square().sum()

    return trained(parallel(Classifier(), *batch()), loss_of)


@program
def weights_get_noise(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    torch.manual_seed(1)
    for loss in trained(net, call):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        yield loss
    return net


@program
def weights_are_initialized_after_planning(parallel: Parallel) -> Training:
    net: Any = parallel(Classifier(), *batch())
    torch.manual_seed(3)
    nn.init.orthogonal_(net.first.weight)
    net.second.reset_parameters()
    return trained(net, call)


@program
def numbers_of_weights_are_read(parallel: Parallel) -> Training:
    net: Any = parallel(Classifier(), *batch())
    for loss in trained(net, call):
        yield loss
        for parameter in net.parameters():
            yield parameter.mean().item()
            yield float(parameter.sum())
            yield parameter.std().item()
            yield float((parameter > 0.001).any())
    return net


@program
def an_auxiliary_loss_in_an_attribute(parallel: Parallel) -> Training:
    class Auxiliary(Classifier):
        auxiliary: Any = 0.0

        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            self.auxiliary = hidden.abs().mean()
            return hidden

    net: Any = parallel(Auxiliary(), *batch())
    return trained(net, lambda net, x, y: net(x, y) + net.auxiliary)


@program
def a_model_is_recomputed_as_a_whole(parallel: Parallel) -> Training:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Any:
        return checkpoint(net, x.requires_grad_(), y, use_reentrant=False)

    return trained(parallel(Classifier(), *batch()), loss_of)


@program
def a_model_with_dropout_is_recomputed_as_a_whole(parallel: Parallel) -> Training:
    class Dropped(Classifier):
        def hidden(self, x: Tensor) -> Tensor:
            return super().hidden(x) + 0.0 * F.dropout(x, 0.5).sum()

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Any:
        return checkpoint(net, x, y, use_reentrant=False)

    return trained(parallel(Dropped(), *batch()), loss_of)


@program
def a_jacobian_by_vmap(parallel: Parallel) -> Training:
    net = parallel(_layers(), batch()[0])
    jacobian = torch.func.vmap(torch.func.jacrev(lambda x: net(x[None])[0]))
    yield number(jacobian(batch()[0]).square().mean())
    return net


@program
def gradients_are_reduced_by_hand(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    for step in range(STEPS):
        loss = net(*batch(step))
        loss.backward()
        for parameter in net.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
        yield number(loss)
    return net

"""What `test_training_guard.py` runs on two ranks, which train alike or differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw

X, Y = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 3
STEPS = 3

OfStep = Callable[[int], float]


def planned(*, loss: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    net = sw.WithLoss(layers, nn.CrossEntropyLoss()) if loss else layers
    batch = (X, Y) if loss else (X,)
    return sw.parallelize(net, sw.plan(net, batch, devices=2, **options))


def train(
    net: Any,
    *,
    rate: OfStep = lambda step: 0.1,
    steps: OfStep = lambda step: 1,
    clip: float = 0.0,
    zeroes: OfStep = lambda step: 1,
    factor: float = 1.0,
    outer_loss: Callable[[Tensor], Tensor] | None = None,
    change: Callable[[Any], object] = lambda net: None,
    **options: Any,
) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **options)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = net(X, Y) if outer_loss is None else outer_loss(net(X))
        (factor * loss).backward()
        if clip:
            net.clip_grad_norm_(clip)
        if step == 1:
            change(net)
        for _ in range(int(steps(step))):
            optimizer.step()
        if zeroes(step):
            optimizer.zero_grad()


def trains_two_models_with_a_schedule() -> None:
    nets = planned(), planned(mode="data_parallel")
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0)
    for step in range(2 * STEPS):
        for net, optimizer in zip(nets, optimizers, strict=True):
            if step % 2:
                (net(X, Y) / 2).backward()
            loss = net(X, Y)
            (loss / 2).backward()
            plateau.step(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            nets[0].eval()(X, Y)
        nets[0].train()


def trains_by_a_closure() -> None:
    net = planned()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(X, Y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def trains_a_plain_model_of_its_own() -> None:
    """On each rank with another rate, which is no affair of the planned model."""
    net, own = planned(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1 * (1 + dist.get_rank()))
    for _ in range(STEPS):
        own(torch.ones(2)).sum().backward()
        optimizer.step()
        net.train_step(X, Y)


def cases(rank: int) -> dict[str, Callable[[], None]]:
    entropy = nn.functional.cross_entropy
    return {
        "alike": lambda: train(planned(), clip=1.0, momentum=0.9),
        "alike outside": lambda: train(planned(loss=False), outer_loss=lambda z: entropy(z, Y)),
        "alike, two models": trains_two_models_with_a_schedule,
        "alike, closure": trains_by_a_closure,
        "alike, own model": trains_a_plain_model_of_its_own,
        "rate": lambda: train(planned(), rate=lambda step: 0.1 * (1 + rank * (step == 1))),
        "decay": lambda: train(planned(), weight_decay=0.1 * rank),
        "step": lambda: train(planned(), steps=lambda step: not (rank and step == 1)),
        "factor": lambda: train(planned(), factor=1.0 + rank),
        "labels": lambda: train(
            planned(loss=False), outer_loss=lambda z: entropy(z, (Y + rank) % 3)
        ),
        "torch clip": lambda: train(
            planned(), change=lambda net: rank and nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        ),
        "scale": lambda: train(
            planned(mode="data_parallel"),
            change=lambda net: rank and next(net.parameters()).grad.mul_(2),
        ),
        "drop": lambda: train(
            planned(mode="data_parallel"),
            change=lambda net: rank and setattr(next(net.parameters()), "grad", None),
        ),
        "clip": lambda: train(planned(), clip=1.0 + rank),
        "zero": lambda: train(planned(), zeroes=lambda step: not (rank and step == 0)),
    }


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    for name, case in cases(rank).items():
        try:
            case()
        except sw.DataError as error:
            print(f"rank {rank}, {name}: {str(error).splitlines()[0]}", flush=True)
        else:
            print(f"rank {rank}, {name}: passed", flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()

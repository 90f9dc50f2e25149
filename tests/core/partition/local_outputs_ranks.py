"""Run by `test_local_outputs.py` on every rank, which passes its local batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from shardwright.run import local_batch
from torchrun import run_checks

CLASSES = 6
Loss = Callable[[Tensor, Tensor], Tensor]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class WithOwnLoss(nn.Module):
    """Has a loss of its own, from which its logits are not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": logits.square().mean(), "logits": logits}


class OfTokens(nn.Module):
    """Returns logits of all tokens of all samples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x[:, None].expand(-1, 3, -1) * torch.arange(3)[:, None]).flatten(0, 1)


class WithPairs(nn.Module):
    """Returns logits, and products of all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(x)
        return logits, logits @ logits.T


class WithTemperature(nn.Module):
    """Returns embeddings and a temperature, from which the loss compares all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.log_scale = classifier(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(x), self.log_scale.exp()


def logits_of(outputs: Any) -> Tensor:
    if isinstance(outputs, tuple):
        return outputs[0]
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs
    return logits


MODELS: tuple[Callable[[], nn.Module], ...] = (classifier, WithOwnLoss, OfTokens, WithPairs)

LOSSES: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "one-hot": lambda o, y: F.mse_loss(o.softmax(-1), F.one_hot(y, CLASSES).float()),
    "gather": lambda o, y: -o.log_softmax(-1).gather(1, y[:, None]).mean(),
    "indices of samples": lambda o, y: -o.log_softmax(-1)[torch.arange(len(y)), y].mean(),
    "in place": lambda o, y: o.mul_(2)[:, 0].sub(y).square().mean(),
    "sample after sample": lambda o, y: torch.stack(
        [F.cross_entropy(sample, label) for sample, label in zip(o, y, strict=True)]
    ).sum(),
}


def batch(samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs and labels of all ranks, and those of this rank."""
    generator = torch.Generator().manual_seed(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(samples * ranks, 8, generator=generator)
    y = torch.randint(CLASSES, (samples * ranks,), generator=generator)
    local = slice(rank * samples, (rank + 1) * samples)
    return x, y, x[local].clone(), y[local].clone()


def planned(net: nn.Module, x: Tensor) -> nn.Module:
    ranks = dist.get_world_size()
    plan = sw.plan(net, (x,), devices=ranks, dataset_strategy="data_parallel")
    return sw.parallelize(net, plan, copy=True)


def compare_gradients(net: nn.Module, reference: nn.Module, message: str) -> None:
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, message
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=message)


def check_losses_outside_of_the_model_train_as_under_ddp() -> None:
    for samples in (1, 3):
        x, _, local_x, local_y = batch(samples)
        for make in MODELS:
            net, ddp = planned(make(), x), DistributedDataParallel(make())
            labels = local_y.repeat_interleave(3) if make is OfTokens else local_y
            for name, loss in LOSSES.items():
                values = []
                for model in (net, ddp):
                    model.zero_grad()
                    values.append(loss(logits_of(model(local_x)), labels))
                    values[-1].backward()
                torch.testing.assert_close(values[0].detach(), values[1].detach(), msg=name)
                compare_gradients(net, ddp.module, f"{make.__name__}, {name}")


def check_a_temperature_has_the_mean_gradient_of_all_ranks() -> None:
    x, _, local_x, _ = batch(3)
    net, ddp = planned(WithTemperature(), x), DistributedDataParallel(WithTemperature())

    def contrastive(model: nn.Module) -> Tensor:
        embeddings, scale = model(local_x)
        return F.cross_entropy(scale * embeddings @ embeddings.T, torch.arange(len(local_x)))

    for model in (net, ddp):
        contrastive(model).backward()
    compare_gradients(net, ddp.module, "contrastive")
    # Neither rank waits for a rank whose loss has no temperature.
    net.zero_grad()
    embeddings, scale = net(local_x)
    (embeddings.square().mean() * (scale if dist.get_rank() else 1)).backward()
    reference = WithTemperature()
    for rank, local in enumerate(x.chunk(dist.get_world_size())):
        embeddings, scale = reference(local)
        (embeddings.square().mean() * (scale if rank else 1) / dist.get_world_size()).backward()
    compare_gradients(net, reference, "on one rank")


def check_sharded_models_train_as_under_ddp() -> None:
    """Two local batches, each passed by two ranks that shard the second layer."""
    x, y, _, _ = batch(2)
    for seed in range(4):
        net, ddp = classifier(), DistributedDataParallel(classifier())
        sw.shard(net[2], ((2, 1), (2, 1)) if seed % 2 else ((2, 2), (1, 2)))
        plan = sw.plan(
            *(net, (x,)),
            devices=4,
            mode="sharding_propagation",
            dataset_strategy=((2, 1),),
            hsdp=sw.OptimizerParallel("level3") if seed > 1 else None,
        )
        parallel = sw.parallelize(net, plan, copy=True)
        local_x = local_batch(plan, dist.get_rank(), (x,))[0]
        local_y = y.chunk(2)[int(not torch.equal(local_x, x.chunk(2)[0]))]
        for model in (parallel, ddp):
            F.cross_entropy(model(local_x), local_y).backward()
        compare_gradients(parallel, ddp.module, str(seed))


def check_an_evaluation_counts_each_sample_once() -> None:
    x, y, local_x, local_y = batch(2)
    net = planned(classifier(), x).eval()
    with torch.no_grad():
        correct = (net(local_x).argmax(-1) == local_y).sum()
        wanted = (classifier()(x).argmax(-1) == y).sum()
    dist.all_reduce(correct)
    assert correct == wanted


def check_a_global_mean_is_that_of_the_whole_batch() -> None:
    x, y, local_x, local_y = batch(3)
    weights = torch.rand(CLASSES, generator=torch.Generator().manual_seed(2))
    for make in (classifier, WithOwnLoss):
        net, reference = planned(make(), x), make()
        total = F.cross_entropy(logits_of(net(local_x)), local_y, weights, reduction="sum")
        loss = sw.global_mean(total, weights[local_y].sum())
        wanted = F.cross_entropy(logits_of(reference(x)), y, weights)
        torch.testing.assert_close(loss.detach(), wanted.detach())
        loss.backward()
        wanted.backward()
        compare_gradients(net, reference, make.__name__)


def check_a_loss_in_the_model_is_that_of_the_whole_batch() -> None:
    for samples in (1, 3):
        x, y, local_x, local_y = batch(samples)
        net = sw.WithLoss(classifier(), nn.CrossEntropyLoss())
        plan = sw.plan(net, (x, y), devices=dist.get_world_size(), dataset_strategy="data_parallel")
        loss = sw.parallelize(net, plan, copy=True)(local_x, local_y)
        torch.testing.assert_close(loss.detach(), net(x, y).detach())
        loss.backward()


def check_local_outputs_are_the_local_batch_of_another_model() -> None:
    x, _, local_x, local_y = batch(2)
    first, second = planned(nn.Linear(8, 8).requires_grad_(), x), planned(classifier(), x)
    plain = [nn.Linear(8, 8), classifier()]
    plain[0].load_state_dict({k: v.full_tensor() for k, v in first.state_dict().items()})
    plain = [DistributedDataParallel(model) for model in plain]
    gradients = []
    for models in ([first, second], plain):
        inputs = local_x.clone().requires_grad_()
        F.cross_entropy(models[1](models[0](inputs)), local_y).backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients)
    compare_gradients(first, plain[0].module, "first")
    compare_gradients(second, plain[1].module, "second")


def check_a_global_output_that_ranks_train_with_different_losses_is_refused() -> None:
    x, _, local_x, local_y = batch(3)
    net = planned(WithPairs(), x)
    _, pairs = net(local_x)
    assert pairs.shape == (len(x), len(x))
    try:
        (pairs.square().mean() * (1 + local_y).float().mean()).backward()
    except sw.DataError as error:
        assert "rank 1 and rank 0 train output" in str(error), error
    else:
        raise AssertionError("trained with different losses")


CHECKS = (
    check_losses_outside_of_the_model_train_as_under_ddp,
    check_a_temperature_has_the_mean_gradient_of_all_ranks,
    check_an_evaluation_counts_each_sample_once,
    check_a_global_mean_is_that_of_the_whole_batch,
    check_a_loss_in_the_model_is_that_of_the_whole_batch,
    check_local_outputs_are_the_local_batch_of_another_model,
    check_a_global_output_that_ranks_train_with_different_losses_is_refused,
)

CHECKS_ON_FOUR_RANKS = (check_sharded_models_train_as_under_ddp,)


if __name__ == "__main__":
    run_checks(CHECKS if os.environ["WORLD_SIZE"] == "2" else CHECKS_ON_FOUR_RANKS)

"""Run by `test_whole_batch.py` on every rank, which passes its shard of the batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from torchrun import run_checks

CLASSES = 5
Loss = Callable[[Tensor, Tensor], Tensor]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class WithNorm(nn.Module):
    """Has a loss of its own, so that its logits stay in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": logits.square().mean(), "logits": logits}


def logits_of(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, dict) else outputs


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all ranks, and this rank's part."""
    generator = torch.Generator().manual_seed(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(rows * ranks, 8, generator=generator)
    y = torch.randint(CLASSES, (rows * ranks,), generator=generator)
    mine = slice(rank * rows, (rank + 1) * rows)
    return x, y, x[mine].clone(), y[mine].clone()


def planned(net: nn.Module, x: Tensor) -> nn.Module:
    ranks = dist.get_world_size()
    return sw.parallelize(
        net, sw.plan(net, (x,), devices=ranks, dataset_strategy="data_parallel"), copy=True
    )


REFUSED_BY_SHAPE: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "one-hot": lambda o, y: F.mse_loss(o.softmax(-1), F.one_hot(y, CLASSES).float()),
    "gather": lambda o, y: -o.log_softmax(-1).gather(1, y[:, None]).mean(),
    "row numbers": lambda o, y: -o.log_softmax(-1)[torch.arange(len(y)), y].mean(),
    "a column": lambda o, y: (o[:, 0] - y).square().mean(),
    "accuracy": lambda o, y: (o.argmax(-1) == y).float().mean(),
}
REFUSED_BY_GRADIENT: dict[str, Loss] = {
    "own rows": lambda o, y: F.cross_entropy(o.chunk(dist.get_world_size())[dist.get_rank()], y),
    "pairs of rows": lambda o, y: sum(  # type: ignore[arg-type,return-value]
        F.cross_entropy(row, label) for row, label in zip(o, y, strict=False)
    ),
    "a factor": lambda o, y: o.square().mean() * (1 + y).float().mean(),
}


def refusal(compute: Callable[..., object], *args: Any) -> str:
    try:
        compute(*args)
    except sw.DataError as error:
        return str(error)
    raise AssertionError("trained by a part of the batch")


def train(net: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> None:
    loss(logits_of(net(x)), y).backward()


def check_losses_outside_of_the_model_with_labels_of_a_part_are_refused() -> None:
    for rows in (1, 3):
        x, _, my_x, my_y = batch(rows)
        for net in (classifier(), WithNorm()):
            parallel = planned(net, x)
            for name, loss in REFUSED_BY_SHAPE.items():
                error = refusal(train, parallel, loss, my_x, my_y)
                assert f"{__file__}:" in error and f"{rows} of {2 * rows} samples" in error, name
                assert "put the loss into the model" in error, name


def check_gradients_that_differ_between_ranks_are_refused() -> None:
    x, _, my_x, my_y = batch(3)
    for net in (classifier(), WithNorm()):
        parallel = planned(net, x)
        for name, loss in REFUSED_BY_GRADIENT.items():
            error = refusal(train, parallel, loss, my_x, my_y)
            assert "rank 1 and rank 0 train" in error, (name, error)


def check_a_metric_of_an_evaluation_is_refused() -> None:
    x, y, my_x, my_y = batch(1)
    parallel = planned(classifier(), x).eval()
    with torch.no_grad():
        best = parallel(my_x).argmax(-1)
        assert "torch.Tensor.__eq__" in refusal(torch.Tensor.__eq__, best, my_y)
        assert (best == y).shape == y.shape


def check_losses_of_the_labels_of_all_ranks_train_as_on_one_device() -> None:
    for rows in (1, 3):
        x, y, my_x, my_y = batch(rows)
        labels = [torch.empty_like(my_y) for _ in range(dist.get_world_size())]
        dist.all_gather(labels, my_y)
        for net in (classifier(), WithNorm()):
            parallel = planned(net, x)
            for name, loss in REFUSED_BY_SHAPE.items():
                parallel.zero_grad()
                net.zero_grad()
                values = [
                    loss(logits_of(parallel(my_x)), torch.cat(labels)),
                    loss(logits_of(net(x)), y),
                ]
                torch.testing.assert_close(values[0].detach(), values[1].detach(), msg=name)
                if not values[0].requires_grad:
                    continue
                for value in values:
                    value.backward()
                for mine, wanted in zip(parallel.parameters(), net.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, msg=name)


def check_a_loss_in_the_model_is_that_of_the_whole_batch() -> None:
    for rows in (1, 3):
        x, y, my_x, my_y = batch(rows)
        net = sw.WithLoss(classifier(), nn.CrossEntropyLoss())
        plan = sw.plan(net, (x, y), devices=2, dataset_strategy="data_parallel")
        loss = sw.parallelize(net, plan, copy=True)(my_x, my_y)
        torch.testing.assert_close(loss.detach(), net(x, y).detach())
        loss.backward()


def check_an_output_of_the_whole_batch_is_no_part_for_another_model() -> None:
    x, _, my_x, _ = batch(2)
    first = planned(nn.Linear(8, 8), x)
    assert "combine both models in one module" in refusal(planned(classifier(), x), first(my_x))
    whole = sw.parallelize(net := classifier(), sw.plan(net, (x,), devices=2), copy=True)
    assert whole(first(my_x)).shape == (4, CLASSES)


CHECKS = (
    check_losses_outside_of_the_model_with_labels_of_a_part_are_refused,
    check_gradients_that_differ_between_ranks_are_refused,
    check_a_metric_of_an_evaluation_is_refused,
    check_losses_of_the_labels_of_all_ranks_train_as_on_one_device,
    check_a_loss_in_the_model_is_that_of_the_whole_batch,
    check_an_output_of_the_whole_batch_is_no_part_for_another_model,
)


if __name__ == "__main__":
    run_checks(CHECKS)

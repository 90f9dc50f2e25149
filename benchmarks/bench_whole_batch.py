"""The loss of the whole batch from micro-batches

Losses of a network of two layers on 8 samples, the first two with label 0, planned for two devices
with 2 and 4 micro-batches, in one stage and in two, and checked on simulated ranks in float64
(`sw.check`): the largest difference of the loss and of any gradient to the eager module on the
whole batch, or that the plan is refused. Schedules differ on real processes only, where the tests
compare them. *Cost*: CPU time of what is computed once per step for the whole batch / CPU time of
a step on one device, with 1,024 samples and two hidden layers of width 1,024.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from benchmarks.size import Size
from benchmarks.table import Table
from shardwright.core.parallel.whole_batch_values import GlobalBatchValues, batch_reduction
from shardwright.core.runtime.devices import Devices

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "mean": lambda z, y: z.square().mean(),
    "sum": lambda z, y: z.square().sum(),
    "sum / len(x)": lambda z, y: z.square().sum() / len(z),
    "mean * len(x)": lambda z, y: z.square().mean() * len(z),
    "cross entropy": lambda z, y: F.cross_entropy(z, y),
    "ignored labels": lambda z, y: F.cross_entropy(z, y, ignore_index=0),
    "label smoothing": lambda z, y: F.cross_entropy(z, y, ignore_index=0, label_smoothing=0.1),
    "class weights": lambda z, y: F.cross_entropy(z, y, torch.arange(1.0, 6).to(z)),
    "sum / num_items": lambda z, y: F.cross_entropy(z, y, reduction="sum") / 7,
    "masked mean": lambda z, y: (z.square().mean(1) * (y > 0)).sum() / (y > 0).sum(),
    "weighted mean": lambda z, y: (z.exp().mean(1) * y).sum() / y.sum(),
    "where": lambda z, y: torch.where(y > 0, z.exp().mean(1), 0).sum() / (y > 0).sum(),
    "loss of each sample / labels": lambda z, y: (z.square().mean(1) * y / y.sum()).sum(),
    "two divisors": lambda z, y: F.cross_entropy(z, y, ignore_index=0) + z.square().mean(),
    "two masks": lambda z, y: sum(
        (z.exp().mean(1) * (y == c)).sum() / (y == c).sum() for c in (0, 3)
    ),
    "NLL and a sum": lambda z, y: F.nll_loss(z.log_softmax(1), y) + z.sin().sum() / 3,
    "own log probabilities": lambda z, y: -z.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "normalized advantages": lambda z, y: (
        z.mean(1) * (y - y.double().mean()) / y.double().std()
    ).mean(),
    "rank in the batch": lambda z, y: (z.mean(1) * y.argsort().argsort()).mean(),
    "root of a mean": lambda z, y: z.square().mean().sqrt(),
    "product of means": lambda z, y: z.square().mean() * z.exp().mean(),
    "deviation": lambda z, y: z.std(0).mean(),
    "pairs": lambda z, y: (z @ z.t()).exp().mean(),
    "hardest": lambda z, y: z.square().mean(1).max(),
    "learned mask": lambda z, y: (z * (z > 0)).sum() / (z > 0).sum(),
}
REFUSED = 6
SPLITS = ((2, 1), (4, 1), (2, 2), (4, 2))
"""Numbers of micro-batches and of stages."""


class Net(nn.Module):
    def __init__(self, loss: Loss, width: int = 8) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(6, width)
        self.last, self.loss = nn.Linear(width, 5), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.last(self.first(x).tanh()), y)


def run(size: Size = Size.DEFAULT) -> list[Table]:
    columns = [f"{count} micro-batches, {stages} stages" for count, stages in SPLITS]
    table = Table("Differences to the whole batch", ["loss", *columns, "cost"])
    refused = 0
    for name, loss in LOSSES.items():
        found = [difference(loss, *split) for split in size.of(SPLITS[1:3], full=SPLITS)]
        refused += None in found
        cells = ["refused" if each is None else f"{each:.0e}" for each in found]
        cells += ["–"] * (len(SPLITS) - len(cells))
        table.add(name, *cells, "–" if None in found else f"{cost(loss):.2%}")
        if any(each is not None and each > 1e-9 for each in found):
            table.missed.append(f"{name} differs from the whole batch")
    if refused != REFUSED:
        table.missed.append(f"{refused} losses are refused, not {REFUSED}")
    return [table]


def difference(loss: Loss, micro_batches: int, stages: int) -> float | None:
    """Largest difference of loss and gradients; None if the plan is refused."""
    torch.manual_seed(0)
    net, call = Net(loss), (torch.randn(8, 6), torch.tensor([0, 0, 1, 2, 3, 4, 0, 1]))
    try:
        plan = sw.plan(net, call, devices=2, micro_batches=micro_batches, stages=stages)
    except sw.StrategyError:
        return None
    checked = sw.check(net, call, None, plan)
    return max(checked.loss_difference, checked.gradient_difference)


def cost(loss: Loss) -> float:
    """CPU time of what is computed of the whole batch, relative to a step."""
    net, call = Net(loss, 1024), (torch.randn(1024, 6), torch.randint(0, 5, (1024,)))
    net.first = nn.Sequential(net.first, nn.Tanh(), nn.Linear(1024, 1024))
    plan = sw.plan(net, call, devices=1, micro_batches=4)
    assert plan.graph is not None
    if batch_reduction(plan.graph).prologue is None:
        return 0.0
    values = GlobalBatchValues(plan.partitioned, Devices.of_rank(plan.mesh, 0))
    step = sw.parallelize(net, plan, "cpu", copy=True).train_step
    return seconds(lambda: values(call, {})) / seconds(lambda: step(*call))


def seconds(function: Callable[[], object]) -> float:
    """Shortest of 20 calls, after a warm-up."""
    function()
    times = []
    for _ in range(20):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return min(times)

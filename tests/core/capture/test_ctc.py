"""The loss of connectionist temporal classification is cut over samples and exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import random_plan
from shardwright.core.graph.ctc import CTC_LOSSES
from shardwright.core.rules import rule_of

CLASSES, STEPS, ROWS = 6, 9, 4
TARGETS = torch.tensor([[1, 2, 2], [3, 0, 0], [5, 1, 0], [4, 4, 4]])
LENGTHS = torch.tensor([3, 1, 2, 3])


class Recognizer(nn.Module):
    """Its targets in rows, or in one row as a mask selects them."""

    def __init__(self, selected: bool, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(8, CLASSES)
        self.selected, self.reduction = selected, reduction

    def forward(self, x: Tensor, targets: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        scores = self.out(x).log_softmax(-1).transpose(0, 1)
        if self.selected:
            mask = targets != 0
            lengths, targets = mask.sum(-1), targets.masked_select(mask)
        loss = F.ctc_loss(scores, targets, times, lengths, 0, self.reduction, zero_infinity=True)
        return loss if loss.ndim == 0 else loss @ torch.arange(1.0, ROWS + 1).to(loss.dtype)


def batch(targets: Tensor = TARGETS) -> tuple[Tensor, ...]:
    x = torch.randn(ROWS, STEPS, 8, generator=torch.Generator().manual_seed(0))
    return x, targets, torch.tensor([9, 7, 9, 3]), LENGTHS


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("selected", [False, True])
def test_the_loss_is_cut_over_samples_and_exact(selected: bool, reduction: str) -> None:
    net = Recognizer(selected, reduction)
    plan = sw.plan(net, batch(), devices=4)
    (loss,) = [op for op in plan.graph.ops if op.target is CTC_LOSSES]
    rule = rule_of(loss)
    assert rule is not None
    assert rule.factors == ("b",)
    for each in (plan, random_plan(plan.graph, 4, seed=1)):
        check = sw.check(net, batch(), None, each)
        assert check.passes(), check


def test_targets_that_are_selected_from_anywhere_come_first_in_their_rows() -> None:
    net = Recognizer(selected=True, reduction="mean")
    args = batch(torch.tensor([[0, 2, 1], [3, 0, 0], [5, 0, 1], [0, 0, 4]]))
    check = sw.check(net, args, None, sw.plan(net, args, devices=4))
    assert check.passes(), check


class Listed(Recognizer):
    """Passes lengths as lists."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        scores = self.out(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, [STEPS] * len(x), (3,) * len(x), 0, "mean", True)


def test_lengths_may_be_lists() -> None:
    net, args = Listed(selected=False, reduction="mean"), batch()[:2]
    plan = sw.plan(net, args, devices=2, micro_batches=2)
    assert sw.check(net, args, None, plan).passes()

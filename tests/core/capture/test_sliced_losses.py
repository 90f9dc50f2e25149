"""Cross entropies of all but a few tokens read all of them, so that the sequence is divisible."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import random_plan

LENGTH, CLASSES = 16, 32
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Sliced(nn.Module):
    """A layer of logits and a loss of some tokens of a batch."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)
        self.loss = loss

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head, self.embedding(ids).tanh(), ids)


def of_logits(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden)[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1))


def of_hidden_states(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    logits, labels = head(hidden[:, :-1]), ids[:, 1:]
    options = {"weight": torch.arange(CLASSES, dtype=logits.dtype), "label_smoothing": 0.1}
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=3, **options)


def from_both_ends(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    logits = head(hidden)[:, 1:-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten(), reduction="sum")


def of_one_token(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden[:, -1:]).flatten(0, 1), ids[:, :1].flatten())


def of_each_token(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    logits = head(hidden)[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return each.square().mean()


def after_dropout(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    logits = head(F.dropout(hidden[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def tokens_of_loss(net: nn.Module, ids: Tensor) -> int:
    graph = sw.capture(net, (ids,))
    (loss,) = (op for op in graph.ops if op.short_name == "cross_entropy")
    return loss.inputs[0].shape[1]


@pytest.mark.parametrize("loss", [of_logits, of_hidden_states, from_both_ends])
def test_all_tokens_are_read_with_targets_that_are_ignored(loss: Loss) -> None:
    net, ids = Sliced(loss).double(), torch.randint(CLASSES, (2, LENGTH))
    assert tokens_of_loss(net, ids) == LENGTH
    for seed in range(2):
        result = sw.check(net, (ids,), {}, random_plan(sw.capture(net, (ids,)), 8, seed))
        assert result.passes(1e-9), str(result)


def test_a_sharded_sequence_of_logits_is_not_gathered_for_the_loss() -> None:
    net, ids = Sliced(of_logits), torch.randint(CLASSES, (1, LENGTH))
    sw.shard(net.head, ((1, 4, 1), (1, 1)))
    plan = sw.plan(net, (ids,), devices=4, mode="sharding_propagation")
    (loss,) = (op.name for op in plan.graph.ops if op.short_name == "cross_entropy")
    assert plan.cuts[loss] == plan.cuts["head"] == {"s": (0,)}


@pytest.mark.parametrize("loss", [of_one_token, of_each_token, after_dropout])
def test_slices_of_few_tokens_and_losses_of_each_token_stay(loss: Loss) -> None:
    assert tokens_of_loss(Sliced(loss), torch.randint(CLASSES, (2, LENGTH))) < LENGTH

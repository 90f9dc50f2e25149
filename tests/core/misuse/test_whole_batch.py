"""Outputs of the global batch reject shards of it, and nothing else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

import shardwright as sw
from core.misuse.whole_batch_ranks import CHECKS
from shardwright.core.misuse.paired_batch import BatchSizes
from shardwright.core.misuse.whole_batch import OutputBatch, WholeBatchTensor, to_plain_tensor
from torchrun import checks_on_ranks

test_a_part_of_the_batch_is_refused_on_two_ranks = checks_on_ranks(CHECKS, 2)

SIZES = [
    # rows of a rank, ranks, length, classes: some of these are equal by chance
    (1, 2, 3, 5),
    (1, 2, 2, 2),
    (1, 4, 4, 8),
    (3, 2, 5, 7),
    (4, 2, 4, 8),
    (4, 2, 8, 4),
    (2, 4, 2, 2),
]

Bad = Callable[[Tensor, Tensor, Tensor], Any]
Good = Callable[[Tensor, int, int], Any]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(output, target)
        return (output - target).square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        output, target = ctx.saved_tensors
        return 2 * gradient * (output - target), None


def in_autocast(compute: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return compute()


BAD: dict[str, Bad] = {
    # output: rows of all ranks, length, classes; y: labels of a rank, t: targets of a rank
    "cross entropy": lambda o, y, t: F.cross_entropy(o.transpose(1, 2), y),
    "cross entropy of flat rows": lambda o, y, t: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    "shifted": lambda o, y, t: F.cross_entropy(
        o[:, :-1].reshape(-1, o.shape[2]), y[:, 1:].reshape(-1)
    ),
    "under autocast": lambda o, y, t: in_autocast(lambda: F.mse_loss(o, t)),
    "mse": lambda o, y, t: F.mse_loss(input=o, target=t),
    "a loss module": lambda o, y, t: nn.SmoothL1Loss()(o, t),
    "by hand": lambda o, y, t: (t - o).square().mean(),
    "in double precision": lambda o, y, t: (o.double() - t.double()).sum(),
    "in place": lambda o, y, t: o.clone().sub_(t).sum(),
    "chosen log-probabilities": lambda o, y, t: o.log_softmax(-1).gather(-1, y[..., None]).sum(),
    "by row numbers": lambda o, y, t: o[:, 0].log_softmax(-1)[torch.arange(len(y)), y[:, 0]].sum(),
    "a mask": lambda o, y, t: o.masked_fill(t > 0, 0.0).sum(),
    "selected by a mask": lambda o, y, t: o.masked_select(t > 0).sum(),
    "indexed by a mask": lambda o, y, t: o[y[:, 0] > 1].sum(),
    "chosen by a condition": lambda o, y, t: torch.where(y[..., None] == 1, o, 0).sum(),
    "weights of samples": lambda o, y, t: (t[:, 0, 0] * o.square().mean((1, 2))).mean(),
    "divided by norms": lambda o, y, t: (o / t.norm(dim=(1, 2), keepdim=True)).sum(),
    "of the last position": lambda o, y, t: (o[:, -1] - t[:, -1]).sum(),
    "of a class": lambda o, y, t: (o[..., 0] - t[..., 0]).sum(),
    "of a maximum": lambda o, y, t: (o.max(1).values - t.max(1).values).sum(),
    "one position after the other": lambda o, y, t: sum(
        (o[:, i] - t[:, i]).sum() for i in range(o.shape[1])
    ),
    "transposed": lambda o, y, t: (o.permute(1, 0, 2) - t.permute(1, 0, 2)).sum(),
    "with another dimension": lambda o, y, t: (o[None] - t[None]).sum(),
    "pairs of samples": lambda o, y, t: ((o[:, 0] @ o[:, 0].T) * (y[:, :1] == y[:, 0][None])).sum(),
    "einsum": lambda o, y, t: torch.einsum("bsv,bsv->b", o, t).sum(),
    "cosines": lambda o, y, t: F.cosine_embedding_loss(o[:, 0], t[:, 0], torch.ones(len(y))),
    "triplets": lambda o, y, t: F.triplet_margin_loss(o[:, 0], t[:, 0], t[:, 0] + 1),
    "an autograd function": lambda o, y, t: Squared.apply(o, t),
    "accuracy": lambda o, y, t: (o.detach().argmax(-1) == y).float().mean(),
    "accuracy of several batches": lambda o, y, t: (
        torch.cat([o.argmax(-1), o.argmax(-1)]) == torch.cat([y, y])
    ).sum(),
    "on the host": lambda o, y, t: o.detach().cpu().allclose(t),
}


def batch_of(rows: int, all_rows: int) -> OutputBatch:
    return OutputBatch("output 'logits'", BatchSizes(rows, all_rows), lambda *_: None)


@pytest.mark.parametrize("name", BAD)
def test_a_part_is_refused_whatever_it_is_combined_by(name: str) -> None:
    for rows, ranks, length, classes in SIZES:
        output = torch.randn(rows * ranks, length, classes, requires_grad=True)
        labels, targets = torch.zeros(rows, length).long(), torch.randn(rows, length, classes)
        with pytest.raises(sw.DataError, match="put the loss into the model"):
            BAD[name](batch_of(rows, rows * ranks).label(output), labels, targets)


def test_a_distribution_of_an_output_refuses_the_label_of_a_part_of_one_sample() -> None:
    output = batch_of(1, 2).label(torch.randn(2, 4))
    with pytest.raises(sw.DataError, match="put the loss into the model"):
        Categorical(logits=output).log_prob(torch.zeros(1))


def test_a_compiled_loss_takes_an_output() -> None:
    plain = torch.randn(2, 4, requires_grad=True)
    loss = torch.compile(F.mse_loss, backend="aot_eager")
    value = loss(batch_of(1, 2).label(plain), torch.zeros(2, 4))
    torch.testing.assert_close(value, plain.square().mean())
    with pytest.raises(sw.DataError):
        loss(batch_of(1, 2).label(plain), torch.zeros(1, 4))


def test_the_error_names_operator_output_shapes_line_and_remedy() -> None:
    output = batch_of(1, 2).label(torch.randn(2, 4))
    line = test_the_error_names_operator_output_shapes_line_and_remedy.__code__.co_firstlineno + 4
    with pytest.raises(sw.DataError) as error:
        F.mse_loss(output.relu(), torch.zeros(1, 4))
    for part in (
        f"`torch.nn.functional.mse_loss` ({__file__}:{line}) combines output 'logits', of shape [2",
        "with a tensor of shape [1, 4], but with this `dataset_strategy` this rank passed 1 of 2",
        "`sw.WithLoss`",
        "gather the labels",
    ):
        assert part in str(error.value)


def similarities(output: Tensor) -> Tensor:
    return output.mean(1) @ output.mean(1).T


GOOD: dict[str, Good] = {
    # output, length, classes
    "labels of all ranks": lambda o, s, v: F.cross_entropy(
        o.transpose(1, 2), torch.zeros(len(o), s).long()
    ),
    "weights of classes": lambda o, s, v: F.cross_entropy(
        o.flatten(0, 1), torch.zeros(len(o) * s).long(), weight=torch.rand(v)
    ),
    "one-hot labels": lambda o, s, v: (
        o * F.one_hot(torch.zeros(len(o), s, dtype=torch.long), v)
    ).sum(),
    "a number": lambda o, s, v: (o * torch.tensor(2.0)).sum() + 2 ** o.mean(),
    "a bias": lambda o, s, v: (o + torch.rand(v)).sum(),
    "weights of positions": lambda o, s, v: (o * torch.rand(s, 1)).sum(),
    "a causal mask": lambda o, s, v: (o @ o.transpose(1, 2) + torch.ones(s, s).triu()).sum(),
    "a linear layer with as many outputs as a part has rows": lambda o, s, v: (
        F.linear(o, torch.rand(4, v), torch.rand(4)).sum() + F.linear(o, torch.rand(2, v)).sum()
    ),
    "prototypes": lambda o, s, v: torch.cdist(o.mean(1), torch.rand(4, v)).sum(),
    "its own statistics": lambda o, s, v: (
        (o - o.mean(0, keepdim=True)) / (1 + o.std(0, keepdim=True))
    ).sum(),
    "a mean over the batch": lambda o, s, v: (
        o.mean(0) * torch.rand(s, v) + o.mean((0, 1)) * torch.rand(1)
    ).sum(),
    "similarities": lambda o, s, v: F.cross_entropy(similarities(o), torch.arange(len(o))),
    "weights of all samples": lambda o, s, v: (similarities(o) * torch.rand(len(o), 1)).sum(),
    "a table of classes": lambda o, s, v: torch.rand(v)[o.argmax(-1)].sum(),
    "some positions": lambda o, s, v: o[:, torch.arange(s), torch.zeros(s, dtype=torch.long)].sum(),
    "another order": lambda o, s, v: o[torch.arange(len(o)).flip(0)].sum(),
    "rows": lambda o, s, v: sum(row.sum() for row in o),
    "itself": lambda o, s, v: o[o > 0].sum(),
    "norms": lambda o, s, v: (
        nn.LayerNorm(v)(o).sum() + nn.BatchNorm1d(v)(o.transpose(1, 2)).square().sum()
    ),
    "convolution": lambda o, s, v: F.conv1d(o.transpose(1, 2), torch.rand(4, v, 1)).sum(),
    "a recurrent layer": lambda o, s, v: nn.LSTM(v, 3, batch_first=True)(o)[0].sum(),
    "attention": lambda o, s, v: F.scaled_dot_product_attention(
        o, o, o, attn_mask=torch.ones(s, s).bool()
    ).sum(),
    "copies": lambda o, s, v: (
        copy.deepcopy(o.detach()) + pickle.loads(pickle.dumps(o.detach()))
    ).sum(),
    "numpy": lambda o, s, v: torch.as_tensor(o.detach().numpy().sum()),
    "text": lambda o, s, v: torch.tensor(len(o.tolist()) + len(f"{o.mean():.1f}")),
    "transforms": lambda o, s, v: torch.vmap(torch.sum)(o).sum(),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_part_is_accepted(name: str) -> None:
    for rows, ranks, length, classes in SIZES:
        plain = torch.randn(rows * ranks, length, classes, requires_grad=True)
        results = []
        for output in (plain, batch_of(rows, rows * ranks).label(plain)):
            torch.manual_seed(0)
            results.append(GOOD[name](output, length, classes))
            if results[-1].requires_grad:
                results[-1].backward()
            results.append(plain.grad)
            plain.grad = None
        torch.testing.assert_close(results[2:], results[:2], equal_nan=True)


def test_constants_of_one_row_are_accepted_unless_a_part_has_one() -> None:
    output, constant = torch.randn(4, 3), torch.rand(1, 3)
    batch_of(2, 4).label(output) * constant
    one_row = batch_of(1, 4).label(output)
    with pytest.raises(sw.DataError, match=r"pass the row \(`c\[0\]`\)"):
        one_row * constant
    torch.testing.assert_close(to_plain_tensor(one_row * constant[0]), output * constant)
    torch.testing.assert_close(
        to_plain_tensor(one_row * constant.expand(len(output), -1)), output * constant
    )


def test_numbers_and_copies_are_ordinary_tensors() -> None:
    output = batch_of(1, 2).label(torch.randn(2, 3))
    assert type(output.exp()) is WholeBatchTensor
    assert type(output.mean()) is type(copy.deepcopy(output)) is Tensor
    assert type(pickle.loads(pickle.dumps(output))) is Tensor


def test_random_numbers_stay_those_of_ordinary_tensors() -> None:
    drawn = []
    for output in (torch.ones(4, 3), batch_of(2, 4).label(torch.ones(4, 3))):
        torch.manual_seed(0)
        drawn.append(to_plain_tensor(F.dropout(output) + torch.rand(3)) + torch.rand(1))
    torch.testing.assert_close(drawn[1], drawn[0])

"""Reductions over selected rows, also over none, equal the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from core.capture.selections import CLASSES, WIDTH, Program, Selecting, assert_equal_to_eager, batch
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError


def masked_labels(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    labels = labels.masked_fill(~mask, -100)
    valid = labels != -100
    scores = net.head(net.hidden(x))[valid]
    return F.cross_entropy(scores, labels[valid], label_smoothing=0.1)


def weighted_classes(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, CLASSES, dtype=x.dtype)
    return F.cross_entropy(net.head(x)[mask], labels[mask], weight, ignore_index=3)


def detection(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    positive = labels > 5
    valid, boxes = mask | positive, net.hidden(x)
    distances = F.smooth_l1_loss(boxes[positive][:, :4], x[positive][:, :4], reduction="none")
    classes = F.cross_entropy(net.head(x)[valid], labels[valid])
    return classes + distances.sum() / positive.sum().clamp(min=1)


def focal(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    scores = net.head(x)[mask].log_softmax(-1)
    chosen = scores.gather(1, labels[mask].unsqueeze(1)).squeeze(1)
    return (-((1 - chosen.exp()) ** 2) * chosen).mean()


def class_means(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    sums = torch.zeros(CLASSES, WIDTH, dtype=x.dtype).index_add(
        0, labels[mask], net.hidden(x)[mask]
    )
    ones = torch.ones_like(labels[mask], dtype=x.dtype)
    counts = torch.zeros(CLASSES, dtype=x.dtype).index_add(0, labels[mask], ones)
    return (sums / counts.clamp(min=1).unsqueeze(1)).square().sum()


def reduced_loss(loss: str, reduction: str) -> Program:
    def program(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        function = getattr(F, loss)
        inputs = net.hidden(x)[mask].sigmoid(), x[mask].sigmoid()
        result: Tensor = function(*inputs, reduction=reduction)
        return result

    return program


EQUAL: dict[str, Program] = {
    "masked labels": masked_labels,
    "weighted classes": weighted_classes,
    "detection": detection,
    "focal": focal,
    "class means": class_means,
    "mean": lambda net, x, labels, mask: ((net.hidden(x) - x) ** 2)[mask].mean(),
    "mean of losses": lambda net, x, labels, mask: F.cross_entropy(
        net.head(x).transpose(1, 2), labels, reduction="none"
    )[mask].mean(),
    "variance": lambda net, x, labels, mask: net.hidden(x)[mask].var(),
    "variances without correction": lambda net, x, labels, mask: (
        net.hidden(x)[mask].var(0, unbiased=False).square().sum()
    ),
    "deviations": lambda net, x, labels, mask: net.hidden(x)[mask].std(0, keepdim=True).sum(),
    "deviations of equal numbers": lambda net, x, labels, mask: (
        net.hidden(x)[mask] + (net.hidden(x)[mask] * 0).std(0)
    ).sum(),
    "attention to rows": lambda net, x, labels, mask: (
        (net.head(x)[mask].softmax(0).T @ net.hidden(x)[mask]).square().mean()
    ),
    "logarithms of attention": lambda net, x, labels, mask: (
        net.head(x)[mask].log_softmax(0)[:, 0].mean()
    ),
    "mean of columns": lambda net, x, labels, mask: net.hidden(x)[mask].mean(0).square().sum(),
    "any": lambda net, x, labels, mask: (
        net.hidden(x)[mask].sum() * (net.hidden(x)[mask] > 1).any() * (x[mask] < 4).all()
    ),
    "norm": lambda net, x, labels, mask: net.hidden(x)[mask].norm(),
    "product of rows": lambda net, x, labels, mask: (
        (net.hidden(x)[mask].T @ net.hidden(x)[mask]).square().mean()
    ),
    **{
        f"{loss}, {reduction}": reduced_loss(loss, reduction)
        for loss in ("mse_loss", "l1_loss", "binary_cross_entropy", "kl_div")
        for reduction in ("mean", "sum", *(("batchmean",) if loss == "kl_div" else ()))
    },
}


@pytest.mark.parametrize("reduction", EQUAL)
def test_a_reduction_equals_the_model(reduction: str) -> None:
    assert_equal_to_eager(EQUAL[reduction])


def test_a_mean_of_bfloat16_is_summed_in_float32() -> None:
    def program(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return net.hidden(x)[mask].bfloat16().mean()

    targets = [(str(op.target), op.kwargs) for op in capture(Selecting(program), batch(0.5)).ops]
    assert ("aten.sum.dim_IntList", {"dtype": torch.float32}) in targets


EXTREMES: dict[str, Program] = {
    "max": lambda net, x, labels, mask: net.hidden(x)[mask].max(),
    "largest of columns": lambda net, x, labels, mask: net.hidden(x)[mask].max(0).values.sum(),
    "smallest of columns": lambda net, x, labels, mask: net.hidden(x)[mask].amin(0).sum(),
    "largest label": lambda net, x, labels, mask: (
        net.hidden(x).sum() * labels[mask].max() * labels[mask].min()
    ),
    "max of two": lambda net, x, labels, mask: torch.max(net.hidden(x)[mask], x[mask]).sum(),
}


@pytest.mark.parametrize("reduction", EXTREMES)
def test_an_extreme_of_selected_rows_equals_the_model(reduction: str) -> None:
    # PyTorch raises an error for the extreme of no row.
    assert_equal_to_eager(EXTREMES[reduction], chances=(0.5, 0.3, 1.0))


def test_a_deviation_of_bfloat16_is_summed_in_float32() -> None:
    def program(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return net.hidden(x)[mask].bfloat16().std()

    graph = capture(Selecting(program), batch(0.5))
    sums = [op for op in graph.ops if str(op.target) == "aten.sum.dim_IntList"]
    assert {value.dtype for op in sums for value in op.outputs} == {torch.float32}
    assert graph.outputs[0].dtype == torch.bfloat16


def index_of_the_largest(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    largest = net.hidden(x)[mask].max(0)
    return largest.values.sum() * largest.indices.sum()


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("median", lambda net, x, labels, mask: net.hidden(x)[mask].median()),
        ("max", index_of_the_largest),
    ],
)
def test_a_statistic_of_rows_is_refused(name: str, program: Program) -> None:
    with pytest.raises(CaptureError, match=f"`{name}` combines rows"):
        capture(Selecting(program), batch(0.5))

"""Tests of values as people write them in `forward`; pytest rewrites `assert` in files of tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Guard = Callable[[Tensor, Tensor], object]
CLASSES = 4


def raises(x: Tensor, labels: Tensor) -> None:
    if labels.max() >= CLASSES:
        raise ValueError("a label is too large")


def raises_otherwise(x: Tensor, labels: Tensor) -> None:
    if labels.min() >= 0 and labels.max() < CLASSES:
        pass
    else:
        message = "labels"
        raise ValueError(message)


def asserts(x: Tensor, labels: Tensor) -> None:
    assert not x.isnan().any(), "not a number"
    assert x.isfinite().all() and not (x.abs() > 1e6).any()
    assert (x.abs().sum() > 0) or labels.any()


def asserts_numbers(x: Tensor, labels: Tensor) -> None:
    assert labels.max().item() < CLASSES
    assert labels.min().item() >= 0 and len(x) == len(labels)
    torch._assert(labels.max() < CLASSES, "a label is too large")


def compares(x: Tensor, labels: Tensor) -> None:
    if not torch.equal(x, x.clone()):
        raise ValueError("copies differ")
    if x.shape[0] != 8 or not torch.allclose(x, x * 1.0):
        raise ValueError("values differ")


def warns(x: Tensor, labels: Tensor) -> None:
    if (labels == 0).all():
        warnings.warn("all labels are 0", stacklevel=2)


def branches(x: Tensor, labels: Tensor) -> None:
    if labels.max() >= CLASSES:
        labels.clamp_(max=CLASSES - 1)


def branches_otherwise(x: Tensor, labels: Tensor) -> None:
    if labels.max() >= CLASSES:
        raise ValueError("a label is too large")
    if labels.any():
        labels.clamp_(max=CLASSES - 1)


def catches(x: Tensor, labels: Tensor) -> None:
    try:
        if labels.max() >= CLASSES - 1:
            raise ValueError("a label is too large")
    except ValueError:
        labels.zero_()


def leaves(x: Tensor, labels: Tensor) -> None:
    for limit in (1, CLASSES):
        if labels.max() < limit:
            if limit == CLASSES:
                break
            raise ValueError("a label is too small")


def reads(x: Tensor, labels: Tensor) -> None:
    largest = labels.max().item()
    if largest >= CLASSES:
        raise ValueError("a label is too large")

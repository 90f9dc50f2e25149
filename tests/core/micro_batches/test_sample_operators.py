"""Operators that micro-batches cannot compute are refused with the reason."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from core.micro_batches.interpreted import Loss, Model, of_micro_batch, rows

REASONS: dict[str, Loss] = {
    "selects some samples of the batch": lambda parts, h, y: h[:2].square().mean(),
    "depends on parameters (multiply by a mask": lambda parts, h, y: rows(h).log().nanmean(),
    "pass indices of shape (samples, length)": lambda parts, h, y: F.embedding_bag(
        y, parts["linear"].weight, y.cumsum(0) - y, mode="sum"
    ).mean(),
    "not proportional to the batch size": lambda parts, h, y: (
        parts["linear"].weight[y[2:]] - parts["linear"].weight[y[:-2]]
    ).mean(),
    "several sizes of its input depend on the batch size": lambda parts, h, y: (
        ((y[:, None] == y).to(h.dtype) @ rows(h)).square().mean()
    ),
    "transpose the batch dimension to the front": lambda parts, h, y: (
        h.transpose(0, 1).reshape(-1, 6).exp() * y.repeat(3)[:, None]
    ).mean(),
}
"""Part of the reason, and a loss that is refused for it."""


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_named(reason: str) -> None:
    why = of_micro_batch(Model(REASONS[reason]).double(), 4).whole_batch
    assert isinstance(why, str) and reason in why

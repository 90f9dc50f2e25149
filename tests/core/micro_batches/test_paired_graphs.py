"""What depends on the batch size is that of the batch, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.micro_batches.interpreted import (
    CLASSES,
    Loss,
    Model,
    batch,
    in_micro_batches,
    of_micro_batch,
    rows,
    with_gradient,
)

NUMBERS: dict[str, Loss] = {
    "a slice of parameters": lambda parts, h, y: (
        h.square().mean() + parts["linear"].weight[len(h) - 4 : len(h) - 2].square().sum()
    ),
    "a slice of samples": lambda parts, h, y: (
        h[..., len(h) // 4 - 1 : len(h) // 4 + 1].exp().mean()
    ),
    "the end of a line": lambda parts, h, y: (h * torch.linspace(0, len(h), 6)).mean(),
    "a default of the batch": lambda parts, h, y: F.huber_loss(h, h.detach() + 2, delta=len(h) / 8),
    "a default of a micro-batch": lambda parts, h, y: F.softplus(h, beta=len(h) / 4).mean(),
    "a keyword": lambda parts, h, y: torch.add(h.sin(), h.exp(), alpha=len(h) // 4).mean(),
    "a diagonal": lambda parts, h, y: (h @ h.mT).tril(len(h) // 4 - 2).exp().mean(),
}
"""Losses with a number that depends on the batch size."""


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_of_the_batch(name: str) -> None:
    model = Model(NUMBERS[name]).double()
    (x, y), graph = batch(), of_micro_batch(model, 4)
    found = in_micro_batches(graph, model, [x.double(), y], 2)
    torch.testing.assert_close(found, with_gradient(model, x.double(), y))


Branch = Callable[[nn.ModuleDict, Tensor, bool], Tensor]
BRANCHES: dict[str, Branch] = {
    "a flag": lambda parts, h, part: h.sort(2, descending=not part)[0][..., :2].exp().mean(),
    "other operators": lambda parts, h, part: (h.sin() if part else h.square()).mean(),
    "an operator more": lambda parts, h, part: (h * 3 if part else h).sin().mean(),
    "an operator less": lambda parts, h, part: (h if part else h * 3).sin().mean(),
    "swapped operands": lambda parts, h, part: (
        torch.stack([h.sin(), h.cos()][:: 1 if part else -1]) * torch.arange(2)[:, None, None, None]
    ).mean(),
    "another parameter": lambda parts, h, part: (
        (F.linear(h, parts["linear"].weight if part else parts["attention"].out_proj.weight))
        .square()
        .mean()
    ),
    "an operand more": lambda parts, h, part: F.cross_entropy(
        rows(h), h.argmax(2)[:, 0], CLASSES.to(h) if part else None
    ).mean(),
    "a text": lambda parts, h, part: F.gelu(h, approximate="none" if part else "tanh").mean(),
    "a dtype": lambda parts, h, part: h.to(torch.float32 if part else torch.bfloat16).mean(),
    "an order": lambda parts, h, part: (
        (h[:, :, :3] if part else h[:, :, :3].mT) * torch.arange(3)
    ).mean(),
}
"""Losses that differ for parts of the batch."""


@pytest.mark.parametrize("samples", [4, 1])
@pytest.mark.parametrize("name", BRANCHES)
def test_what_depends_on_the_batch_size_is_refused(name: str, samples: int) -> None:
    loss = BRANCHES[name]
    model = Model(lambda parts, h, y: loss(parts, h, len(h) < 8)).double()
    assert isinstance(of_micro_batch(model, samples).whole_batch, str)

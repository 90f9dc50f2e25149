"""Runs programs that select rows by masks, captured with one mask, with the values of others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwright.core.capture.capture import capture
from shardwright.core.graph.interpreter import interpret

BATCH, STEPS, WIDTH, CLASSES = 4, 6, 8, 10
CHANCES = (0.5, 0.1, 1.0, 0.0)
"""Chance with which a row is selected, of each batch that is compared."""


class Selecting(nn.Module):
    """A model of a program, a function of the module, hidden states, labels and a mask."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.computed = program
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.table, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return self.computed(self, x, labels, mask)


Program = Callable[[Selecting, Tensor, Tensor, Tensor], Tensor]


def batch(chance: float, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, STEPS, WIDTH, generator=draws, dtype=torch.float64)
    labels = torch.randint(CLASSES, (BATCH, STEPS), generator=draws)
    return x, labels, torch.rand(BATCH, STEPS, generator=draws) < chance


def assert_equal_to_eager(program: Program, chances: tuple[float, ...] = CHANCES) -> None:
    """The captured program has the values and gradients of the model, whatever the mask."""
    net = Selecting(program)
    graph = capture(net, batch(0.5, seed=0))
    parameters = dict(net.named_parameters())
    for chance in chances:
        call = batch(chance)
        results = []
        for loss in (net(*call), interpret(graph, parameters, {}, call)[0]):
            net.zero_grad()
            loss.backward()
            gradients = [p.grad for p in parameters.values()]
            results.append([loss.detach(), *(0 if g is None else g for g in gradients)])
        for expected, actual in zip(*results, strict=True):
            expected, actual = map(torch.as_tensor, (expected, actual))
            torch.testing.assert_close(
                actual.expand_as(expected) if actual.ndim == 0 else actual,
                expected.expand_as(actual) if expected.ndim == 0 else expected,
                rtol=1e-9,
                atol=1e-11,
                equal_nan=True,
                check_dtype=False,
            )

"""Modules whose tensors are initialized in every way that there is, for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import init

FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "uniform": init.uniform_,
    "normal": init.normal_,
    "xavier uniform": init.xavier_uniform_,
    "xavier normal": init.xavier_normal_,
    "kaiming uniform": init.kaiming_uniform_,
    "kaiming normal": init.kaiming_normal_,
    "orthogonal": init.orthogonal_,
    "sparse": partial(init.sparse_, sparsity=0.2),
    "eye": init.eye_,
    "constant": partial(init.constant_, val=0.5),
    "truncated, nothing redrawn": partial(init.trunc_normal_, std=0.02),
    "truncated, much redrawn": partial(init.trunc_normal_, std=0.02, a=-0.02, b=0.02),
    "truncated, a tail": partial(init.trunc_normal_, a=2.0, b=3.0),
    "operators": lambda t: t.uniform_(-1, 1).erfinv_().mul_(0.1).add_(1).clamp_(min=0.9),
    "a part": lambda t: t.zero_()[0].normal_(),
    "twice": lambda t: init.normal_(init.uniform_(t)),
    "through data": lambda t: t.data.normal_(),
    "other data": lambda t: setattr(t, "data", torch.randn(20, 30) * 0.02),
    "real data": lambda t: setattr(t, "data", torch.tensor([1.0, 2.0])),
}


class Odd(nn.Module):
    """Buffers and attributes made by what few models do."""

    def __init__(self) -> None:
        super().__init__()
        self.legacy = nn.Parameter(torch.Tensor(3, 4).uniform_())
        self.bfloat16_weight = nn.Parameter(torch.randn(3, dtype=torch.float64).to(torch.bfloat16))
        self.register_buffer("from_data", self.legacy.new_tensor([1.0, 2.0]))
        self.register_buffer("order", torch.randperm(20))
        positions = torch.arange(10).float()[:, None]
        rates = torch.pow(10000.0, -torch.arange(0, 8, 2) / 8)
        self.register_buffer("positions", torch.stack([(positions * rates).sin()] * 2, -1))
        turned = torch.polar(torch.ones(4, 3), torch.rand(4, 3)).conj()
        self.register_buffer("rotations", torch.view_as_real(turned.resolve_conj()))
        self.register_buffer("where", torch.nonzero(torch.rand(20) > 0.5))
        self.rates = [x.item() for x in torch.linspace(0, 1, 4)]
        if torch.rand(()) < 0.5:
            self.register_buffer("rare", torch.zeros(2))
        filled = torch.tensor([1.0, 2.0, 3.0])
        filled[1:] = torch.rand(2)
        self.register_buffer("filled", filled)
        self.plain = torch.rand(3)


class Seeded(nn.Module):
    """Draws from several generators, and from one that is seeded and restored between."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.register_buffer("first", torch.rand(3))
        self.register_buffer("own", torch.rand(3, generator=own))
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.register_buffer("forked", torch.rand(3))
        self.register_buffer("after", torch.rand(3))
        self.register_buffer("own_after", torch.rand(3, generator=own))
        torch.manual_seed(3)
        self.register_buffer("seeded", torch.rand(3))
        torch.manual_seed(3)
        self.register_buffer("seeded_again", torch.rand(3))


def one_parameter(function: Callable[[torch.Tensor], object]) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.empty(20, 30)))
    with torch.no_grad():
        function(module.weight)
    return module


def layers() -> nn.Module:
    """Modules that build, copy, tie or reparametrise others."""
    wrap = nn.utils.parametrizations
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    return nn.ModuleList(
        [
            tied,
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
            nn.LSTM(4, 4, 2),
            nn.Embedding(5, 4, padding_idx=2),
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            nn.MultiheadAttention(8, 2).double(),
            wrap.weight_norm(nn.Linear(4, 4)),
            wrap.orthogonal(nn.Linear(4, 4)),
            wrap.spectral_norm(nn.Linear(4, 4)),
        ]
    )

"""`flex_attention` with score modifications and block masks, compared with PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.testing import assert_close

import shardwright as sw
from random_plans import random_plan
from shardwright.core.capture.flex_attention import flex_attention_by_operators
from shardwright.core.torch_internals.flex import flex_gradients_on_cpu, uncompiled_flex_attention

compiled = torch.compile(flex_attention)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3, -1, -1]])


def of_documents(documents: Tensor) -> BlockMask:
    def is_kept(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = documents[b, q] == documents[b, k]
        return same & (q >= k) & (documents[b, q] >= 0)

    return create_block_mask(is_kept, 2, None, 8, 8, device="cpu", BLOCK_SIZE=4)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


CAUSAL = create_block_mask(causal, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)


class Attention(nn.Module):
    """Two key-value heads, four query heads, and a bias for each distance."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mask = kind, CAUSAL
        self.project, self.bias = nn.Linear(8, 32), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in self.project(x).split([16, 8, 8], -1)
        )
        if self.kind == "score":

            def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return 5 * torch.tanh(score / 5) + self.bias[h, (q - k).abs()]

            y = flex_attention(q, k, v, score_mod=modified, enable_gqa=True)
        elif self.kind == "lse":
            aux = AuxRequest(lse=True)
            y, sums = compiled(q, k, v, block_mask=self.mask, enable_gqa=True, return_aux=aux)
            y = y * torch.sigmoid(sums.lse).unsqueeze(-1)
        else:
            mask = given if self.kind == "argument" else of_documents(given)
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return y.square().mean()  # type: ignore[no-any-return]


ARGUMENTS = {"inside": DOCUMENTS, "argument": of_documents(DOCUMENTS)}
KINDS = ("score", "lse", "inside", "argument")


def gradients(net: nn.Module, *args: Any) -> dict[str, Tensor]:
    net.zero_grad()
    loss = net(*args)
    loss.backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_are_those_of_pytorch(kind) -> None:
    net, x = Attention(kind).double(), torch.randn(2, 8, 8, dtype=torch.float64)
    eagerly = torch.compiler.set_stance("force_eager")
    with flex_gradients_on_cpu(), uncompiled_flex_attention(), eagerly:
        expected = gradients(net, x, ARGUMENTS.get(kind))
    with flex_attention_by_operators():
        found = gradients(net, x, ARGUMENTS.get(kind))
    # Without a compiler, PyTorch gives a tensor that a score modification reads no gradient.
    assert found.keys() - expected.keys() <= {"bias"}
    assert_close({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_any_dimension_may_be_sharded(kind) -> None:
    net, x = Attention(kind), torch.randn(2, 8, 8)
    args = (x, ARGUMENTS[kind]) if kind in ARGUMENTS else (x,)
    graph = sw.capture(net, args)
    assert sw.check(net, args, None, random_plan(graph, 4, 1)).passes(1e-9)


def test_each_call_has_its_own_mask() -> None:
    net, x = Attention("argument"), torch.randn(2, 8, 8)
    plan = sw.plan(net, (x, of_documents(DOCUMENTS)), devices=2, micro_batches=2)
    other = of_documents(DOCUMENTS.flip(0, 1).clamp(min=0))
    assert sw.check(net, (x, other), None, plan).passes(1e-9)

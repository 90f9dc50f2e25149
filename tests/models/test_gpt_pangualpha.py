"""PanguAlpha."""

from __future__ import annotations

import torch

import shardwright as sw
from shardwright.models import MODELS, Dimensions, build, example_batch
from shardwright.models.gpt import fast_gelu


def test_fast_gelu_is_the_published_function() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    published = x / (1 + torch.exp(-1.702 * x.abs())) * torch.exp(0.851 * (x - x.abs()))
    torch.testing.assert_close(fast_gelu(x), published)


def test_the_head_is_the_embedding() -> None:
    net = build("pangualpha_2_6b_tiny")
    assert not any("lm_head" in name for name, _ in net.named_parameters())
    net(*example_batch(MODELS["pangualpha_2_6b_tiny"], 2, 16)).backward()
    used = net.model.embed_tokens.weight.grad.abs().sum(-1)
    assert (used > 0).all()  # every row: as an input only those that occur would be


def test_the_queries_of_the_last_layer_are_learned_and_not_of_the_tokens() -> None:
    torch.manual_seed(0)
    net = build("pangualpha_2_6b_tiny").double()
    layer, x = net.model.query_layer, torch.randn(2, 16, 64, dtype=torch.float64)
    queries = net.model.embed_queries.weight[:16]
    normed = layer.input_layernorm(x)
    attended = layer.self_attn(normed, queries)
    repeated = layer.self_attn(normed, queries.expand(2, 16, 64))
    torch.testing.assert_close(attended, repeated)
    assert (attended - layer.self_attn(normed)).abs().max() > 1e-3


def test_dropout_is_applied_in_training_only() -> None:
    sizes = MODELS["pangualpha_2_6b_tiny"]
    wet = Dimensions(**{**vars(sizes), "dropout": 0.1})
    net, batch = build(wet), example_batch(sizes, 2, 16)
    assert net(*batch).item() != net(*batch).item()
    assert net.eval()(*batch).item() == net(*batch).item()
    random = [op.name for op in sw.capture(net.train(), batch).ops if "dropout" in op.name]
    assert len(random) == 1 + 2 * 2

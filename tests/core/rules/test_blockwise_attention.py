import pytest
import torch
from torch import Tensor, randn

from core.rules.oracle import check, op_of
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention
from shardwright.core.rules import rule_of


def heads(b: int, h: int, s: int, d: int) -> Tensor:
    return randn(b, h, s, d, dtype=torch.float64)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 11, 12])
def test_positions_may_be_cut_in_blocks_narrower_and_wider_than_the_window(window: int) -> None:
    key, value = heads(1, 2, 12, 3), heads(1, 2, 12, 5)
    found = check(windowed_attention, heads(1, 2, 12, 3), key, value, window)
    assert str(found) == "b h s _, b h s _, b h s _ -> b h s _"
    assert found.factors == ("h", "s")


@pytest.mark.parametrize("kv_heads, factor", [(1, None), (2, "h"), (4, "h")])
def test_grouped_queries_stay_with_their_keys(kv_heads: int, factor: str | None) -> None:
    key, value = heads(2, kv_heads, 6, 3), heads(2, kv_heads, 6, 3)
    found = check(windowed_attention, heads(2, 4, 6, 3), key, value, 3, 0.7)
    assert found.inputs[1] == ("b", factor, "s", None)
    assert found.capacity["h"] == (4 if kv_heads == 1 else kv_heads)


@pytest.mark.parametrize(
    ("window", "blocks", "rows"),
    [
        (4, 1, []),
        (1, 4, []),
        (4, 4, [3]),
        (6, 4, [5]),
        (7, 4, [6]),
        (8, 4, [6, 1]),
        (24, 3, [8, 8]),
    ],
)
def test_a_block_gets_what_the_window_reaches_before_it(
    window: int, blocks: int, rows: list[int]
) -> None:
    tensors = [torch.empty(1, 2, 24, size, device="meta") for size in (8, 8, 4)]
    op = op_of(windowed_attention, *tensors, window)
    rule = rule_of(op)
    assert rule is not None
    sent = rule.reductions(op, {"s": blocks, "h": 2})
    assert [reduction.shape for reduction in sent] == [(1, 1, n, 12) for n in rows]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 1), (1, 1), ()])
def test_queries_are_cut_with_their_numbers(shape: tuple[int, ...], causal: bool) -> None:
    document = torch.arange(12) // 5
    vectors = (
        document[:, None].expand(*shape, 12, 1),
        document.expand(*shape, 1, 12),
        torch.arange(12)[None] < 11,
    )
    q, k, v = heads(2, 4, 12, 3), heads(2, 2, 12, 3), heads(2, 2, 12, 5)
    found = check(masked_attention, q, k, v, vectors, "eq 0 1, all 2", causal)
    assert found.factors == ("b", "h", "s")
    batch = ("b" if shape[:1] == (2,) else None, None)[: len(shape)]
    none = (None,) * len(shape)
    assert found.inputs[1:] == (
        ("b", "h", None, None),
        ("b", "h", None, None),
        (*batch, "s", None),
        (*batch[:1], *none[1:], None, None),
        (None, None),
    )

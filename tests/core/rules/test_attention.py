import pytest
import torch
from torch import Tensor, randn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from core.rules.oracle import check, op_of
from shardwright.core.layout.layout import Layout
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import LocalSharding, Reduce

attend = torch.ops.aten.scaled_dot_product_attention.default


def heads(b: int, h: int, s: int, d: int) -> Tensor:
    return randn(b, h, s, d, dtype=torch.float64)


def test_batch_heads_and_queries_may_be_cut() -> None:
    found = check(attend, heads(2, 6, 4, 3), heads(2, 6, 5, 3), heads(2, 6, 5, 4))
    assert found.factors == ("b", "h", "s")
    assert found.main is not None
    assert list(found.main.labels) == ["b", "h", "s"]


@pytest.mark.parametrize("keys", [6, 8])
def test_causal_queries_may_be_cut(keys) -> None:
    found = check(
        attend, heads(2, 2, 6, 4), heads(2, 2, keys, 4), heads(2, 2, keys, 3), is_causal=True
    )
    assert found.factors[:3] == ("b", "h", "s")
    assert found.inputs[1] == ("b", "h", None if keys == 8 else "ring", None)
    assert found.main is not None
    assert list(found.main.labels) == ["b", "h", "s"]


def test_causal_queries_beyond_the_last_key_stay_whole() -> None:
    found = check(attend, heads(2, 2, 8, 4), heads(2, 2, 6, 4), heads(2, 2, 6, 4), is_causal=True)
    assert found.factors == ("b", "h")


@pytest.mark.parametrize(
    "mask", [(4, 5), (1, 1, 4, 5), (2, 1, 1, 5), (1, 6, 4, 5), (2, 6, 4, 5), (6, 1, 5)]
)
def test_a_mask_is_cut_where_it_is_not_broadcast(mask) -> None:
    bias = randn(*mask, dtype=torch.float64)
    check(attend, heads(2, 6, 4, 3), heads(2, 6, 5, 3), heads(2, 6, 5, 3), bias)


def test_a_boolean_mask_is_cut_with_batch_and_queries() -> None:
    allowed = randn(2, 1, 4, 5) > 0
    allowed[..., 0] = True
    found = check(
        attend, heads(2, 6, 4, 3), heads(2, 6, 5, 3), heads(2, 6, 5, 3), attn_mask=allowed
    )
    assert found.inputs[3] == ("b", None, "s", None)


@pytest.mark.parametrize("kv_heads, most", [(2, 2), (4, 4), (1, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_stay_with_their_keys(kv_heads, most, causal) -> None:
    found = check(
        attend,
        heads(2, 4, 4, 3),
        heads(2, kv_heads, 4, 3),
        heads(2, kv_heads, 4, 3),
        is_causal=causal,
        enable_gqa=True,
    )
    assert found.capacity["h"] == most


def test_a_mask_for_each_query_head_is_cut_in_groups() -> None:
    mask = randn(2, 4, 4, 5, dtype=torch.float64)
    k, v = heads(2, 2, 5, 3), heads(2, 2, 5, 3)
    found = check(attend, heads(2, 4, 4, 3), k, v, mask, enable_gqa=True)
    assert found.inputs[3] == ("b", "h", "s", None)


def test_keys_and_values_that_all_batches_share_stay_whole() -> None:
    found = check(attend, heads(4, 2, 4, 3), heads(1, 2, 5, 3), heads(1, 2, 5, 3))
    assert found.inputs[1] == (None, "h", None, None)


def test_attention_of_three_dimensions() -> None:
    q, k, v = (randn(6, s, 4, dtype=torch.float64) for s in (4, 5, 5))
    assert check(attend, q, k, v, scale=0.3).factors == ("b", "s")


def test_dropout_draws() -> None:
    q = heads(2, 2, 4, 4)
    assert check(attend, q, q.clone(), q.clone(), None, 0.1).random


@pytest.mark.parametrize(("devices", "rows"), [(2, 8), (3, 4), (4, 5)])
def test_devices_share_the_pairs_of_causal_queries_equally(devices: int, rows: int) -> None:
    queries, keys = heads(2, 2, devices * rows, 4), heads(2, 2, devices * rows, 4)
    op = op_of(attend, queries, keys, keys, is_causal=True)
    rule, whole = rule_of(op), attend(queries, keys, keys, is_causal=True)
    assert rule is not None and rule.kernel is not None
    blocks, late = queries.split(rows, -2), rows // 2
    counted = []
    for index, block in enumerate(blocks):
        mirror = devices - 1 - index
        exchanged = blocks[mirror][..., rows - late :, :]
        swaps = (lambda x, other=exchanged: other, lambda x: x)
        local = LocalSharding(
            rule.shard_counts(*cut_into(devices)),
            lambda factor, index=index: index,
            (tuple(block.shape),),
            tuple(Reduce(swap, swap, swap) for swap in swaps),
        )
        run = rule.kernel(op, local)
        with FlopCounterMode(display=False) as flops:
            results = run(block, keys, keys, is_causal=True)
        early, of_other = results.split((rows - late, late), -2)
        assert_close(early, whole.split(rows, -2)[index][..., : rows - late, :])
        assert_close(of_other, whole.split(rows, -2)[mirror][..., rows - late :, :])
        counted.append(flops.get_total_flops())
    assert max(counted) - min(counted) <= max(counted) / rows
    if rows % 2 == 0:
        assert len(set(counted)) == 1


def cut_into(devices: int) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    return Layout((devices,), ("a",)), {"s": (0,)}

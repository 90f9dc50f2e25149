from __future__ import annotations

from queue import SimpleQueue
from threading import Thread

import pytest
import torch
from torch import Tensor, randn
from torch.testing import assert_close

from core.rules.oracle import check, op_of
from shardwright.core.layout.layout import Layout
from shardwright.core.partition.communication import InnerReduction
from shardwright.core.rules import rule_of
from shardwright.core.rules.ring_attention import _AttentionRing
from shardwright.core.rules.rule import MIRROR, RING, LocalSharding, Reduce, Reduction

attend = torch.ops.aten.scaled_dot_product_attention.default


def heads(b: int, h: int, s: int, d: int) -> Tensor:
    return randn(b, h, s, d, dtype=torch.float64)


@pytest.mark.parametrize(
    ("positions", "kv_heads", "size"), [(2, 4, 6), (6, 2, 6), (12, 2, 4), (12, 1, 6)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_keys_go_round_with_as_few_heads_as_they_have(positions, kv_heads, size, causal) -> None:
    found = check(
        attend,
        heads(2, 4, positions, 6),
        heads(2, kv_heads, positions, 6),
        heads(2, kv_heads, positions, size),
        is_causal=causal,
        enable_gqa=kv_heads < 4,
    )
    assert "ring" in found.factors
    assert found.joined == {"ring": "s"}


def test_keys_of_another_sequence_go_round() -> None:
    found = check(attend, heads(2, 2, 8, 6), heads(2, 2, 12, 6), heads(2, 2, 12, 4), scale=0.3)
    assert found.capacity["ring"] == 4


@pytest.mark.parametrize(
    "options",
    [{"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, {"dropout_p": 0.5}],
    ids=["mask", "dropout"],
)
def test_a_mask_or_dropout_keeps_keys_where_they_are(options) -> None:
    rule = rule_of(op_of(attend, *(heads(2, 2, 8, 4) for _ in range(3)), **options))
    assert rule is not None
    assert rule.factors == ("b", "h", "s")


def test_causal_queries_of_another_number_than_keys_keep_keys_where_they_are() -> None:
    keys = heads(2, 2, 12, 4)
    rule = rule_of(op_of(attend, heads(2, 2, 8, 4), keys, keys, is_causal=True))
    assert rule is not None
    assert rule.factors == ("b", "h", "s")


@pytest.mark.parametrize(("devices", "rows"), [(2, 8), (3, 4), (4, 6), (8, 2)])
def test_each_device_has_as_many_causal_pairs_in_every_step(devices: int, rows: int) -> None:
    def none(x: Tensor) -> Tensor:
        return x

    for step in range(devices):
        pairs = set()
        for index in range(devices):
            send = Reduce(none, none, none)
            ring = _AttentionRing(devices, index, 1, 0, (rows // 2, rows // 2), True, 4, None, send)
            counted = 0
            for queries, keys, diagonal in ring.blocks_of_step(step, rows, rows):
                shape = queries.stop - queries.start, keys.stop - keys.start
                counted += int(torch.ones(shape, dtype=torch.int).tril(diagonal).sum())
            pairs.add(counted)
        assert len(pairs) == 1


class Wires:
    """Exchanges between threads that stand for devices."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.queues = [[SimpleQueue[Tensor]() for _ in range(devices)] for _ in range(devices)]
        self.sent = [0] * devices

    def to(self, index: int, target: int, source: int, differentiable: bool) -> Reduce:
        def start(x: Tensor) -> Tensor:
            self.sent[index] += x.nbytes
            self.queues[index][target].put(x.detach().clone())
            return x

        def end(_: Tensor) -> Tensor:
            return self.queues[source][index].get(timeout=60).flatten()

        def run(x: Tensor) -> Tensor:
            return Mirrored.apply(x, lambda x: end(start(x)).view(x.shape))

        return Reduce(run if differentiable else start, start, end)


class Mirrored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        return exchange(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.exchange(gradient), None


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(("rows", "causal"), [(8, True), (5, True), (1, True), (6, False)])
def test_devices_that_know_their_place_compute_what_one_does(devices, rows, causal) -> None:
    whole = [heads(2, 4, devices * rows, 6) for _ in range(3)]
    whole[1:] = (each[:, :2] for each in whole[1:])
    for each in whole:
        each.requires_grad_()
    options = {"is_causal": causal, "enable_gqa": True}
    expected = attend(*whole, **options)
    gradient = randn(expected.shape, dtype=torch.float64)
    of_inputs = torch.autograd.grad(expected, whole, gradient)
    op = op_of(attend, *whole, **options)
    rule = rule_of(op)
    assert rule is not None and rule.kernel is not None
    mesh, counts = Layout((devices,), ("a",)), {**dict.fromkeys("bhs", 1), "ring": devices}
    reductions = rule.reductions(op, counts)
    wires, results = Wires(devices), [None] * devices

    def exchange(index: int, reduction: Reduction) -> Reduce:
        if reduction.operation == MIRROR:
            other = devices - 1 - index
            return wires.to(index, other, other, differentiable=True)
        return wires.to(index, (index + 1) % devices, (index - 1) % devices, differentiable=False)

    def on(index: int) -> None:
        mine = [each.detach().split(rows, -2)[index].clone().requires_grad_() for each in whole]
        local = LocalSharding(
            counts,
            lambda factor: index,
            ((2, 4, rows, 6),),
            tuple(exchange(index, each) for each in reductions),
        )
        out = rule.kernel(op, local)(*mine, **options)
        results[index] = out, *torch.autograd.grad(out, mine, gradient.split(rows, -2)[index])

    threads = [Thread(target=on, args=(index,)) for index in range(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [torch.cat(parts, -2) for parts in zip(*results, strict=True)]
    assert_close(found, [expected, *of_inputs])
    planned = sum(sum(InnerReduction(each, (0,)).bytes(mesh, True)) for each in reductions)
    assert set(wires.sent) == {planned}


def test_gradients_follow_their_keys_home() -> None:
    ring = Reduction(("ring",), RING, (2, 2, 8, 12), torch.float32, varying=True)
    assert ring.num_collectives(4, differentiable=True) == (3, 6)
    assert ring.num_collectives(4, differentiable=False) == (3, 0)

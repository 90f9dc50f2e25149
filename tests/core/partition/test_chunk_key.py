"""Chunks that are alike, and such that are not."""

from __future__ import annotations

import random
from dataclasses import replace

import shardwright as sw
from sample_models import llama
from shardwright.core.partition.chunk_key import chunk_key
from shardwright.core.partition.decisions import Recompute

NET, ARGS, KWARGS = llama(layers=8)


def test_chunks_that_differ_in_one_decision_are_not_alike() -> None:
    plan = sw.plan(NET, ARGS, KWARGS, devices=8, stages=4, micro_batches=4, hsdp=True)
    middle = plan.partitioned.chunks[1]
    ops = [op.name for op in middle.graph.ops if op.inputs]
    name = random.Random(0).choice(ops)
    weight = middle.graph.parameters[0].name
    decisions = middle.decisions
    others = [
        replace(decisions, recompute={name: Recompute("a")}),
        replace(decisions, recompute={name: Recompute("a", communication=False)}),
        replace(decisions, storage={**decisions.storage, weight: ((0, 0), ())}),
        replace(decisions, bucket_bytes=1),
        replace(decisions, cuts={**decisions.cuts, name: {"b": (0,)}}),
        replace(decisions, sharding=None),
    ]
    keys = {chunk_key(replace(middle, decisions=each)) for each in (decisions, *others)}
    assert len(keys) == len(others) + 1


def test_chunks_of_equal_layers_are_alike() -> None:
    plan = sw.plan(NET, ARGS, KWARGS, devices=8, stages=4, micro_batches=4, hsdp=True)
    first, second, third, last = map(chunk_key, plan.partitioned.chunks)
    assert second == third
    assert len({first, second, last}) == 3

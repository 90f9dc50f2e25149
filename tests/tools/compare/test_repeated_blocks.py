"""Copies of a captured block, against capturing every block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph
from shardwright.models import build, example_batch
from shardwright.models.expert_sharding import paths_of_blocks, pin_expert
from shardwright.models.sizes import Dimensions
from shardwright.tools.compare.repeated_blocks import CAPTURED_BLOCKS, with_more_blocks

SIZES = Dimensions(
    family="llama",
    hidden_size=64,
    num_layers=6,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=128,
    vocab_size=256,
    seq_length=16,
    norm_eps=1e-5,
)


def captured(sizes: Dimensions) -> tuple[Graph, list[str]]:
    with torch.device("meta"):
        net = build(sizes)
        batch = example_batch(sizes, 4)
    pin_expert(net, data_parallel=2, model_parallel=2)
    return capture(net, batch, {}, compute_dtype=torch.bfloat16), list(paths_of_blocks(net))


def described(graph: Graph) -> list[str]:
    ops = [
        f"{op.name} {op.target} {op.module} {op.calls} {op.args} {op.kwargs} {op.outputs}"
        for op in graph.ops
    ]
    values = (*graph.parameters, *graph.buffers, *graph.constants)
    return [*ops, *sorted(map(repr, values)), *sorted(graph.module_tags), repr(graph.outputs)]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_copied_blocks_are_those_of_the_whole_model(family: str) -> None:
    whole, _ = captured(replace(SIZES, family=family))
    few, blocks = captured(replace(SIZES, family=family, num_layers=3))
    more = with_more_blocks(few, blocks, 6)
    assert more is not None
    assert described(more) == described(whole)
    known = {*more.parameters, *more.buffers, *more.constants, *more.input_values}
    for op in more.ops:
        assert set(op.inputs) <= known
        known.update(op.outputs)


def test_blocks_that_differ_are_not_copied() -> None:
    few, blocks = captured(replace(SIZES, num_layers=CAPTURED_BLOCKS))
    last = next(op for op in few.ops if op.name == f"{blocks[2]}.mlp.gate_proj")
    ops = tuple(
        replace(op, target=torch.ops.aten.mm.default) if op is last else op for op in few.ops
    )
    assert with_more_blocks(replace(few, ops=ops), blocks, 6) is None

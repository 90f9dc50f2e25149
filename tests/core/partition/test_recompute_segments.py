"""Which operators are computed again together, and which redistributions with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from sample_models import llama
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import Communication, communication
from shardwright.core.partition.decisions import Decisions, Recompute


class Chain(nn.Module):
    """A gate and a product beside it, then a sum that keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 16, bias=False)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.silu(self.gate(x)) * self.up(x))).square().mean()


def flow_of(graph: Graph, cuts: Any, *said: tuple[str, Recompute]) -> Communication:
    decisions = Decisions(cuts, {v.name: ((),) * len(v.shape) for v in graph.parameters})
    return communication(graph, prime_mesh(2), replace(decisions, recompute=dict(said)))


GRAPH = sw.capture(Chain(), (torch.randn(4, 8),))
WHOLE, KEPT = Recompute("all"), Recompute("all", communication=False)


def test_a_segment_ends_with_the_last_operator_that_keeps_something() -> None:
    names = ("gate", "silu", "up", "mul", "down", "down.bias", "add")
    flow = flow_of(GRAPH, {}, *((name, WHOLE) for name in names))
    (segment,) = flow.segments
    assert segment.ops == ("gate", "silu", "up", "mul", "down", "down.bias", "add"), (
        "what follows stays if it reads nothing else"
    )
    assert segment.repeated_ops == ("gate", "silu", "up", "mul"), "down only needs its input"
    flow = flow_of(GRAPH, {}, *((name, WHOLE) for name in names[4:]))
    assert flow.segments[0].ops == ("down", "down.bias"), "x need not be kept for the addition"
    assert flow_of(GRAPH, {}, ("add", WHOLE)).segments == ()


def test_an_operator_between_goes_before_a_segment_that_it_does_not_read() -> None:
    flow = flow_of(GRAPH, {}, ("silu", WHOLE), ("mul", WHOLE), ("down", WHOLE))
    assert [segment.ops for segment in flow.segments] == [("silu", "mul", "down")]


def test_a_segment_is_in_parts_where_an_operator_between_reads_it() -> None:
    flow = flow_of(GRAPH, {}, ("gate", WHOLE), ("silu", WHOLE), ("down", WHOLE))
    assert [(s.name, s.ops) for s in flow.segments] == [
        ("all", ("gate", "silu")),
        ("all/2", ("down",)),
    ]


# The columns of the weights are cut, then the rows: one sum after `down`.
CUTS: Any = {
    "gate": {"j": (0,)},
    "silu": {"s": (0,)},
    "up": {"j": (0,)},
    "mul": {"s": (0,)},
    "down": {"k": (0,)},
}
SUM = 4 * 8 * 4  # bytes that one of two devices sends to add up 4 × 8 float32


def test_a_sum_that_nothing_inside_needs_again_is_made_once() -> None:
    plain = flow_of(GRAPH, CUTS)
    again = flow_of(GRAPH, CUTS, *((op.name, WHOLE) for op in GRAPH.ops[:7]))
    assert again.segments[0].ops[-1] == "down"
    assert (again.forward_bytes, again.backward_bytes) == (
        plain.forward_bytes,
        plain.backward_bytes,
    )


def test_a_sum_inside_is_made_again_or_kept_as_asked() -> None:
    plain = flow_of(GRAPH, CUTS)
    again = flow_of(GRAPH, CUTS, *((op.name, WHOLE) for op in GRAPH.ops))
    kept = flow_of(GRAPH, CUTS, *((op.name, KEPT) for op in GRAPH.ops))
    assert again.forward_bytes == kept.forward_bytes == plain.forward_bytes
    assert again.backward_bytes == plain.backward_bytes + SUM
    assert kept.backward_bytes == plain.backward_bytes
    assert len(again.segments) == 1 and len(kept.segments) == 2


def test_what_comes_in_is_kept_where_it_is_smallest() -> None:
    """A gather is made again; a sum that comes in is kept as it is."""
    gathered = {"silu": {"s": (0,)}, "gate": {"j": (0,)}}
    plain = flow_of(GRAPH, gathered)
    again = flow_of(GRAPH, gathered, ("mul", WHOLE), ("down", WHOLE))
    assert again.backward_bytes - plain.backward_bytes == 4 * 8 * 4
    summed = flow_of(GRAPH, CUTS, ("down.bias", WHOLE), ("add", WHOLE), ("square", WHOLE))
    assert summed.segments[0].ops == ("down.bias", "add", "square")
    assert summed.backward_bytes == flow_of(GRAPH, CUTS).backward_bytes


def test_tensor_parallel_layers_send_one_sum_more_each_with_redistributions() -> None:
    """Of the two sums of a layer the second ends it; without them nothing more is sent."""
    net, args, kwargs = llama()
    sw.recompute(net.model.layers)
    graph = sw.capture(net, args, kwargs)
    plan = sw.plan(graph, devices=4, mem_coeff=10.0)
    plain = replace(plan.decisions, recompute={})
    kept = {n: replace(s, communication=False) for n, s in plan.recompute.items()}
    once = communication(graph, plan.mesh, plain)
    assert plan.backward_bytes > once.backward_bytes
    flow = communication(graph, plan.mesh, replace(plan.decisions, recompute=kept))
    assert flow.backward_bytes == once.backward_bytes
    again = [t for t in communication(graph, plan.mesh, plan.decisions).transfers if t.segment]
    assert plan.backward_bytes - once.backward_bytes == sum(t.forward_bytes for t in again)
    assert not any(t.value.name.endswith("mlp.down_proj") for t in again)
    assert any(t.value.name == "model.layers.1.self_attn.o_proj" for t in again)

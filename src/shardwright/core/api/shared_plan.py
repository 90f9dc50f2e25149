"""Plan on rank 0 and send the plan and its graph to the other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.agreement.store import on_rank_0
from shardwright.core.api.description import description_lines
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.serialize import dumps, loads
from shardwright.core.plan import Plan


def are_all_ranks(devices: int) -> bool:
    """Whether the process group has `devices` ranks, more than one, on a real backend."""
    return devices > 1 and has_other_ranks() and dist.get_world_size() == devices


def shared_plan(request: object, make: Callable[[], Plan]) -> Plan:
    """Return the plan that `make` returns on rank 0, with its graph. Collective.

    Args:
        request: everything that the plan depends on.

    Raises: as `make`, on every rank.
    """
    return on_rank_0("plan", _text(request), make, _plan_text, _plan_of)


def shared_graph(net: nn.Module, plan: Plan, make: Callable[[], Graph]) -> Graph:
    """Return the graph of `net` that `make` captures on rank 0. Collective.

    Raises: as `make`, on every rank.
    """
    request = _text((net, plan.inputs, plan.structure, plan.compute_dtype))
    return on_rank_0("graph", request, make, _graph_text, _graph_of) or make()


def _text(request: object) -> str:
    return "\n".join(description_lines(request))


def _plan_text(plan: Plan) -> str:
    return json.dumps([plan.to_json(), _graph_text(plan.graph)])


def _plan_of(text: str) -> Plan:
    plan, graph = json.loads(text)
    return replace(Plan.from_json(plan, "the plan of rank 0"), graph=_graph_of(graph))


def _graph_text(graph: Graph | None) -> str:
    """The graph as text; "" if it has an operator that cannot be serialized.

    Tags of operators and calls are left out: the plan contains them as decisions.
    """
    if graph is None:
        return ""
    ops = tuple(replace(op, tags=()) for op in graph.ops)
    with suppress(TypeError):
        return dumps(replace(graph, ops=ops, call_tags=())).decode()
    return ""


def _graph_of(text: str) -> Graph | None:
    return loads(text.encode()) if text else None

"""Plan on rank 0, and send the plan and the captured graph to the other ranks."""

from __future__ import annotations

import json
import logging
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

log = logging.getLogger("shardwright")


def are_all_ranks(devices: int) -> bool:
    """Whether a real process group, not a simulated one, of `devices` > 1 ranks is running."""
    return devices > 1 and has_other_ranks() and dist.get_world_size() == devices


def shared_plan(request: object, compute: Callable[[], Plan]) -> Plan:
    """Compute a plan on rank 0, and return the plan with its graph on every rank. Collective.

    Args:
        request: all inputs that determine the plan. A rank with another `request` than rank 0
            computes its own plan.
        compute: computes the plan.

    Raises:
        ShardwrightError: on every rank, if `compute` raises an error on rank 0.
    """
    return on_rank_0(
        "plan", _serialize_request(request), compute, _serialize_plan, _deserialize_plan
    )


def shared_graph(net: nn.Module, plan: Plan, compute: Callable[[], Graph]) -> Graph:
    """Capture a model on rank 0, and return the graph on all ranks. Collective.

    Args:
        net: the model.
        plan: the plan, with the inputs and the dtype of the capture.
        compute: captures the model.

    Raises:
        ShardwrightError: on every rank, if `compute` raises an error on rank 0.
    """
    request = _serialize_request((net, plan.inputs, plan.structure, plan.compute_dtype))
    # A graph that cannot be serialized is received as None; then each rank captures the model.
    return on_rank_0("graph", request, compute, _serialize_graph, _deserialize_graph) or compute()


def _serialize_request(request: object) -> str:
    return "\n".join(description_lines(request))


def _serialize_plan(plan: Plan) -> str:
    return json.dumps([plan.to_json(), _serialize_graph(plan.graph)])


def _deserialize_plan(text: str) -> Plan:
    plan, graph = json.loads(text)
    # The graph is not part of a plan's file.
    return replace(Plan.from_json(plan, "the plan of rank 0"), graph=_deserialize_graph(graph))


def _serialize_graph(graph: Graph | None) -> str:
    """Serialize a graph as text; empty if the graph is None or cannot be serialized.

    Omits the user's tags of operators and calls, which the plan already takes into account.
    """
    if graph is None:
        return ""
    # Tags are arbitrary objects, such as the layouts of pinned operators.
    ops = tuple(replace(op, tags=()) for op in graph.ops)
    # Results may be named tuples or dataclasses, whose structures PyTorch cannot serialize.
    with suppress(TypeError, NotImplementedError):
        return dumps(replace(graph, ops=ops, call_tags=())).decode()
    return ""


def _deserialize_graph(text: str) -> Graph | None:
    """Return the graph of rank 0; None if it is not serialized, or this rank cannot read it.

    A rank cannot read results of classes that `forward` imports, which has run on rank 0 only.
    """
    try:
        return loads(text.encode()) if text else None
    except ValueError as error:
        log.info("this rank captures the model itself: %s", error)
        return None

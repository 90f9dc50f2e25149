"""Check that models and plans of all ranks are equal, and broadcast rank 0's parameters."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwright.core.agreement.collective import check_description, take_values_of_rank_0
from shardwright.core.agreement.content_hash import content_hash
from shardwright.core.deferred import Deferred, init_record_lines, share_generator_states
from shardwright.core.graph.graph import Graph
from shardwright.core.plan import Plan

log = logging.getLogger(__name__)

PROGRAM_FIELDS = (
    *("mesh", "pipeline", "training", "compute_dtype", "inputs", "structure", "arrivals", "cuts"),
    *("storage", "outputs", "sharding", "bucket_bytes", "recompute", "fingerprint"),
)
"""Fields of a plan file that determine the program of each rank."""


def check_ranks_agree(net: nn.Module, graph: Graph, plan: Plan, device: torch.device) -> None:
    """Check that models and plans of all ranks are equal. Collective.

    Args:
        net: this rank's model.
        graph: the captured graph of `net`.
        plan: this rank's plan.
        device: device for collectives.

    Raises:
        PlanError: on every rank, with the first difference.
    """
    check_description([*_describe_model_lines(net, graph), *_describe_plan_lines(plan)], device)


def take_state_of_rank_0(net: nn.Module, device: torch.device) -> None:
    """Broadcast parameters and buffers from rank 0, in place. Collective.

    Args:
        net: this rank's model.
        device: device for collectives.
    """
    tensors = {
        name: t
        # Tensors without values are not compared: deferred ones follow below, meta tensors get
        # values later.
        for name, t in _collect_named_tensors(net).items()
        if not (isinstance(t, Deferred) or t.is_meta)
    }
    differing_names = take_values_of_rank_0(tensors, device)
    if differing_names:
        more = f" and {len(differing_names) - 1} more" if len(differing_names) > 1 else ""
        log.info(
            "%s%s differed between ranks: the values are those of rank 0", differing_names[0], more
        )
    # Deferred tensors have no values to copy, but get rank 0's values with its generator states.
    share_generator_states(
        _collect_named_tensors(net).values(), lambda states: take_values_of_rank_0(states, device)
    )


def _collect_named_tensors(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters()) | dict(net.named_buffers())


def _describe_model_lines(net: nn.Module, graph: Graph) -> Iterator[str]:
    for name, tensor in _collect_named_tensors(net).items():
        role = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        notes = (
            "frozen" * (role == "parameter" and not tensor.requires_grad),
            _describe_device(tensor),
        )
        yield ", ".join((f"{role} {name} {dtype} {list(tensor.shape)}", *filter(None, notes)))
    for value, tensor in graph.constants.items():
        # A tensor that is neither parameter nor buffer is a constant of the program. Rank 0's
        # values of constants are not sent, so all ranks must have equal values.
        yield f"the tensor {value} with the hash {int(content_hash(tensor)):x} (no buffer)"
    yield from init_record_lines(_collect_named_tensors(net).values())


def _describe_device(tensor: Tensor) -> str:
    if isinstance(tensor, Deferred):
        return "without values yet"
    return "on the meta device" * tensor.is_meta


def _describe_plan_lines(plan: Plan) -> Iterator[str]:
    # As in a file of the plan, in which the fields have names and a fixed order.
    plan_fields = json.loads(plan.to_json())
    for key in PROGRAM_FIELDS:
        if isinstance(plan_fields[key], dict) and key not in ("mesh", "pipeline"):
            # One line per operator or parameter, as the error shows the first line that differs.
            yield from (f"plan: {key} of {name}: {each}" for name, each in plan_fields[key].items())
        else:
            yield f"plan: {key}: {plan_fields[key]}"

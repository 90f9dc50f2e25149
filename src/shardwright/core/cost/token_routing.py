"""Tokens that expert parallelism sends, if tokens are sent only to their experts.

A plan gathers the tokens of all devices along the axes of the experts, and sums their outputs.
Megatron Core and torchtitan instead send each token once to each of its experts, by all-to-all
(Lepikhin et al., "GShard", arXiv:2006.16668): at most k of d devices receive it, for k experts per
token. DeepEP sends a token once to a device with several of its experts, and once to each node,
which forwards it.

An all-gather over nodes sends a tensor to each node once, and divides that over the devices of the
node. An all-to-all does not: the copies of a token for devices of another node all pass between the
nodes.

Later steps of a redistribution, such as those over tensor-parallel devices, also send only these
tokens, by all-gather. The weights of experts are stored in the layout that the kernels read, so
they are not redistributed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.layout.axes import Axes
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.transfer import Transfer
from shardwright.core.rules.notation import call_arguments
from shardwright.core.rules.rule import Cuts

SUMS = ("reduce_scatter", "all_reduce")
"""Collectives that sum the outputs of experts over devices."""


DISPATCHES = ("all_gather", "reduce_scatter")
"""Collectives over the axes of the experts that an all-to-all of routed tokens replaces."""


@dataclass(frozen=True)
class RoutedStep:
    """A redistribution step to or from a mixture of experts, and what it sends of its tensor.

    Args:
        fraction: fraction of the bytes of the tensor.
        copies: number of copies of each token of a device that an all-to-all sends instead; None if
            the step is a collective on the routed tokens, such as one over tensor-parallel devices.
    """

    fraction: float
    copies: float | None = None


def routed_steps(
    graph: Graph, communication: Communication, cuts: Mapping[str, Cuts], sends_once: bool = False
) -> dict[Transfer, RoutedStep]:
    """Return for each redistribution step to or from a mixture of experts what it sends, if each
    token is sent only to its experts.

    Args:
        communication: communication of `graph`.
        cuts: the axes of each factor of each operator of `graph`, by operator name.
        sends_once: whether a token is sent once to a device that has several of its experts.
    """
    num_consumers = Counter(
        transfer for route in communication.routes.values() for transfer in route
    )
    steps: dict[Transfer, RoutedStep] = {}
    for op in (op for op in graph.ops if op.target is experts):
        axes = cuts.get(op.name, {}).get("e", ())
        devices = communication.mesh.size(axes)
        top_k = call_arguments(op)["ids"].shape[-1]
        # With balanced routing a device has none of the k experts of a token with (1 - 1/d)^k.
        share_sent_once = 1 - (1 - 1 / devices) ** top_k
        share = share_sent_once if sends_once else min(1.0, top_k / devices)
        for index, value in enumerate(op.inputs):
            # A step that another operator reads too, such as a router, must send all tokens.
            route = [
                each for each in communication.routes[op.name, index] if num_consumers[each] == 1
            ]
            # Input 0 is the tokens. The chosen experts and their weights are sent in full.
            if index == 0:
                steps |= {each: _routed_step(each, axes, devices, share, top_k) for each in route}
            elif _is_computed_from_parameters(graph, value):
                steps |= dict.fromkeys(route, RoutedStep(0.0))
        for transfer in communication.transfers:
            if transfer.value is op.output and transfer.step.operation in SUMS:
                steps[transfer] = _routed_step(transfer, axes, devices, share, top_k)
    return steps


def _routed_step(
    transfer: Transfer, axes: Axes, devices: int, share: float, top_k: int
) -> RoutedStep:
    """Return what `transfer` sends of tokens that are each sent to `top_k` experts.

    Args:
        axes: mesh axes that divide the experts over `devices` devices.
        share: fraction of the tokens that such a device receives.
    """
    step = transfer.step
    if not axes or step.operation not in DISPATCHES or not set(axes) <= set(step.axes):
        return RoutedStep(share)
    # An all-gather over other axes too sends each copy to all devices that share experts.
    return RoutedStep(share, top_k * step.group_size / devices)


def _is_computed_from_parameters(graph: Graph, value: Value) -> bool:
    """Whether `value` is a parameter, or computed from parameters only."""
    producer: Op | None = graph.producer.get(value)
    if producer is None:
        return value.origin is Origin.PARAMETER
    # An operator without inputs, such as `arange`, is computed from no parameter.
    return bool(producer.inputs) and all(
        _is_computed_from_parameters(graph, each) for each in producer.inputs
    )

"""Runs a program on simulated ranks in one process, and compares it with one device.

PyTorch's `LocalTensorMode` holds each tensor once per rank and carries out the collectives between
them, so that the very program that real processes run is tested, its collectives and gradients
included. Every byte that it sends is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import PlanError
from shardwright.graph.graph import Graph, Value
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.lower.program import lower
from shardwright.parallel.train_step import GradientAccumulation
from shardwright.partition.decisions import Decisions
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.runtime.devices import Devices, Index, device_mesh
from shardwright.torch_internals.dispatch import TorchDispatchMode, in_backward_pass
from shardwright.torch_internals.distributed import (
    FakeStore,
    LocalTensorMode,
    by_rank,
    group_named,
    int_by_rank,
    is_collective,
)


@dataclass
class Outcome:
    """What a simulated step gave, put together from all ranks.

    Args:
        outputs: the leaves of the model's outputs, tensors whole.
        gradients: of the parameters that have one, whole.
        updates: the new values of buffers.
        replica_difference: largest difference between ranks that should hold the same numbers.
        forward_bytes, backward_bytes: sent by one device.
    """

    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    replica_difference: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0


@contextmanager
def simulated_devices(layout: Layout) -> Iterator[tuple[Devices, LocalTensorMode | None]]:
    """Simulated ranks on a fake process group, for as long as the context lasts.

    Raises:
        PlanError: if a real process group is running.
    """
    cpu = torch.device("cpu")
    if layout.num_devices == 1:
        yield Devices.of_process(layout, cpu), None
        return
    if dist.is_initialized():
        raise PlanError("ranks cannot be simulated while a process group is running")
    size = layout.num_devices
    places = [layout.coordinates(rank) for rank in range(size)]

    def per_rank(function: Callable[[tuple[int, ...]], int]) -> Index:
        return int_by_rank({rank: function(place) for rank, place in enumerate(places)})

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = device_mesh(layout, "cpu")
        with LocalTensorMode(size) as mode:
            yield Devices(layout, cpu, mesh, per_rank), mode
    finally:
        dist.destroy_process_group()


@dataclass
class Ranks:
    """Simulated ranks that tensors are spread over and put together from.

    Args:
        difference: largest difference of what several ranks hold, of all that was put together.
    """

    layout: Layout
    mode: LocalTensorMode | None
    difference: float = 0.0

    def place(self, tensor: Tensor, where: TensorLayout) -> Tensor:
        """The block of each rank."""

        def block(rank: int) -> Tensor:
            return tensor.detach()[where.slices(rank, tuple(tensor.shape))].clone()

        return block(0) if self.mode is None else self.mode.rank_map(block)

    def with_constants(self, graph: Graph) -> Graph:
        """Each rank slices its part of a constant: it must be there once for each."""
        whole = self.layout.replicated
        constants = {v: self.place(t, whole(t.ndim)) for v, t in graph.constants.items()}
        return replace(graph, constants=constants)

    def whole(self, tensor: Tensor, where: TensorLayout, shape: tuple[int, ...]) -> Tensor:
        """The tensor from the blocks of all ranks."""
        with _disabled(self.mode):
            parts = by_rank(tensor) or {0: tensor}
            if len(parts) < self.layout.num_devices:
                parts = dict.fromkeys(range(self.layout.num_devices), tensor)
            full, difference = assemble_shards(parts, where, shape)
            self.difference = max(self.difference, difference)
            return full


def simulate(
    graph: Graph,
    layout: Layout,
    decisions: Decisions,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    *,
    seed: int = 0,
    output_gradients: Sequence[Tensor | None] | None = None,
) -> Outcome:
    """One forward and backward pass of the planned program on `layout.num_devices` ranks.

    Args:
        parameters, buffers: whole tensors by name.
        inputs: leaves of the call's arguments.
        output_gradients: one for each output value, None for those without; by default 1 for the
            graph's loss.
    """
    outcome = Outcome()
    with torch.random.fork_rng(), simulated_devices(layout) as (devices, mode):
        ranks = Ranks(layout, mode)
        graph = ranks.with_constants(graph)
        program = lower(graph, devices, decisions)
        flow = program.communication
        local = {
            v.name: ranks.place(parameters[v.name], flow.made[v]).requires_grad_(v.requires_grad)
            for v in graph.parameters
        }
        state = {v.name: ranks.place(buffers[v.name], flow.made[v]) for v in graph.buffers}
        leaves = [
            ranks.place(leaf, flow.made[value]) if isinstance(value, Value) else leaf
            for value, leaf in zip(graph.inputs, inputs, strict=True)
        ]
        with ByteCounter() as forward:  # type: ignore[no-untyped-call]
            results, updates = program(local, state, leaves, seed)
        outcome.forward_bytes = forward.sent
        with ByteCounter() as backward:  # type: ignore[no-untyped-call]
            _backward(graph, results, output_gradients, ranks.place, flow.made)
        outcome.backward_bytes = backward.sent
        for value, tensor in zip(graph.outputs, results, strict=True):
            if not isinstance(value, Value):
                outcome.outputs.append(tensor)
                continue
            route = flow.output_routes[value]
            where = route[-1].step.target if route else flow.layout(value)
            outcome.outputs.append(ranks.whole(tensor.detach(), where, value.shape))
        for value in graph.parameters:
            gradient = local[value.name].grad
            if gradient is not None:
                whole = ranks.whole(gradient, flow.made[value], value.shape)
                outcome.gradients[value.name] = whole
        for (buffer, value), tensor in zip(graph.updates, updates, strict=True):
            where = layout.replicated(len(value.shape))
            outcome.updates[buffer.name] = ranks.whole(tensor.detach(), where, value.shape)
        outcome.replica_difference = ranks.difference
    return outcome


def simulate_step(
    graph: Graph,
    layout: Layout,
    decisions: Decisions,
    pipeline: PipelineSpec,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    *,
    seed: int = 0,
) -> Outcome:
    """One training step of one stage on `layout.num_devices` ranks, all its micro-batches.

    Args:
        graph: for one micro-batch.
        parameters, buffers: whole tensors by name.
        inputs: leaves of the call's arguments, with the whole batch.
    """
    outcome = Outcome()
    with torch.random.fork_rng(), simulated_devices(layout) as (devices, mode):
        ranks = Ranks(layout, mode)
        graph = ranks.with_constants(graph)
        step = GradientAccumulation(graph, devices, decisions, pipeline)
        made = step.program.communication.made
        shards = {v.name: ranks.place(parameters[v.name], made[v]) for v in graph.parameters}
        state = {v.name: ranks.place(buffers[v.name], made[v]) for v in graph.buffers}
        leaves = [
            ranks.place(leaf, made[value]) if isinstance(value, Value) else leaf
            for value, leaf in zip(graph.inputs, inputs, strict=True)
        ]
        with ByteCounter() as during:  # type: ignore[no-untyped-call]
            loss, updates = step.run(shards, state, leaves, seed)
        with ByteCounter() as after:  # type: ignore[no-untyped-call]
            gradients = step.residents.end()
        outcome.forward_bytes = during.sent - during.backward
        outcome.backward_bytes = during.backward + after.sent
        outcome.outputs = [ranks.whole(loss, layout.replicated(0), ())]
        by_name = {value.name: value for value in (*graph.parameters, *graph.buffers)}
        for name, gradient in gradients.items():
            value = by_name[name]
            outcome.gradients[name] = ranks.whole(gradient, made[value], value.shape)
        for name, tensor in updates.items():
            outcome.updates[name] = ranks.whole(tensor, made[by_name[name]], by_name[name].shape)
        outcome.replica_difference = ranks.difference
    return outcome


def assemble_shards(
    parts: Mapping[int, Tensor], where: TensorLayout, shape: tuple[int, ...]
) -> tuple[Tensor, float]:
    """The whole tensor from every rank's part, and the largest difference between its copies."""
    layout = where.layout
    sample = parts[0]
    full = torch.zeros(shape, dtype=sample.dtype)
    copies: dict[tuple[int, ...], Tensor] = {}
    difference = 0.0
    own = tuple(sorted(where.sharded | where.partial))
    for place in product(*(range(size) for size in layout.device_matrix)):
        rank = rank_at(layout, place)
        key = tuple(place[axis] for axis in own)
        if key not in copies:
            copies[key] = parts[rank]
            full[where.slices(rank, shape)] += parts[rank]
        elif parts[rank].numel():
            gap = (parts[rank].double() - copies[key].double()).abs().max().item()
            difference = max(difference, gap)
    return full, difference


def rank_at(layout: Layout, place: tuple[int, ...]) -> int:
    """The rank that stands at `place` of the device matrix."""
    number = 0
    for coordinate, size in zip(place, layout.device_matrix, strict=True):
        number = number * size + coordinate
    return layout.ranks[number]


def _backward(
    graph: Graph,
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None] | None,
    place: Callable[[Tensor, TensorLayout], Tensor],
    made: Mapping[Value, TensorLayout],
) -> None:
    if gradients is None:
        tensors = [t for v, t in zip(graph.outputs, outputs, strict=True) if v is graph.loss]
        if graph.loss is not None and graph.loss.requires_grad:
            tensors[0].backward()
        return
    values = [(v, t) for v, t in zip(graph.outputs, outputs, strict=True) if isinstance(v, Value)]
    for (value, tensor), gradient in zip(values, gradients, strict=True):
        if gradient is not None and tensor.requires_grad:
            layout = made[value].layout.replicated(len(value.shape))
            tensor.backward(place(gradient, layout), retain_graph=True)


@contextmanager
def _disabled(mode: LocalTensorMode | None) -> Iterator[None]:
    if mode is None:
        yield
        return
    with mode.disable():
        yield


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that one device sends, for each collective that is called inside; apart
    those of them that autograd makes in a backward pass.

    Ring algorithms: all-gather (p-1)/p of the result, reduce-scatter (p-1)/p of the input,
    all-reduce twice that, all-to-all (p-1)/p of the tensor, a permutation the whole tensor.
    """

    sent = 0
    backward = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_collective(func):
            num_bytes = sent_bytes(func.__name__.split(".")[0], args)
            self.sent += num_bytes
            if in_backward_pass():
                self.backward += num_bytes
        return func(*args, **(kwargs or {}))


def sent_bytes(collective: str, args: tuple[Any, ...]) -> int:
    """Bytes that one device sends in a call of a functional collective."""
    if collective == "wait_tensor":
        return 0
    tensor: Tensor = args[0]
    local = int(tensor.numel() * tensor.element_size())
    if collective == "all_gather_into_tensor":
        return local * int(args[1] - 1)
    if collective == "reduce_scatter_tensor":
        return -(-int(args[2] - 1) * local // int(args[2]))
    if collective in ("all_reduce", "all_reduce_"):
        size = _group_size(args[2])
        return -(-2 * (size - 1) * local // size)
    assert collective == "all_to_all_single", collective
    size = len(args[2])
    equal = all(isinstance(s, int) for s in args[2]) and len(set(args[2])) == 1
    return -(-(size - 1) * local // size) if equal else local


def _group_size(name: str) -> int:
    return int(group_named(name).size())

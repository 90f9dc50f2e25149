"""Run a program on simulated ranks in one process.

PyTorch's `LocalTensorMode` keeps one copy of each tensor per rank and computes the collectives
between them. So the very program that real processes run is tested, with its collectives and
gradients, and every byte that it sends is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.lower.program import lower
from shardwright.core.parallel.train_step import GradientAccumulation, StepInputs
from shardwright.core.partition.communication import Communication, initial_layout
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices, Index
from shardwright.core.torch_internals.dispatch import TorchDispatchMode, in_backward_pass
from shardwright.core.torch_internals.distributed import (
    FakeStore,
    LocalTensorMode,
    by_rank,
    group_named,
    int_by_rank,
    is_collective,
)
from shardwright.errors import PlanError


@dataclass(frozen=True)
class Outcome:
    """Results of a simulated step, assembled from all ranks.

    Args:
        outputs: leaves of the model's outputs, as full tensors.
        gradients: full gradients of the parameters that have one.
        updates: new values of buffers.
        replica_difference: largest difference between replicas.
        stage_bytes: bytes that one device of each stage sent, forward and backward.
    """

    outputs: list[Any]
    gradients: dict[str, Tensor]
    updates: dict[str, Tensor]
    replica_difference: float
    stage_bytes: tuple[tuple[int, int], ...]


@contextmanager
def simulated_devices(layout: DeviceMatrix) -> Iterator[tuple[Devices, LocalTensorMode | None]]:
    """Context with simulated ranks on a fake process group.

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
        with LocalTensorMode(size) as mode:
            yield Devices(layout, cpu, per_rank, connected=True), mode
    finally:
        dist.destroy_process_group()


@dataclass
class Ranks:
    """Simulated ranks, which tensors of a model are sharded over and gathered from.

    Args:
        partitioned: the model; its constants become one copy per rank.
        difference: largest difference between replicas in all gathered tensors.
    """

    partitioned: Partitioned
    devices: Devices
    mode: LocalTensorMode | None
    difference: float = 0.0

    def __post_init__(self) -> None:
        # Each rank slices its block of a constant, so each rank needs a copy.
        graph, whole = self.partitioned.graph, self.partitioned.mesh.replicated
        constants = {v: self.place(t, whole(t.ndim)) for v, t in graph.constants.items()}
        self.partitioned = replace(self.partitioned, graph=replace(graph, constants=constants))

    def place(self, tensor: Tensor, layout: TensorLayout) -> Tensor:
        """Shard a full tensor over the ranks."""

        def block(rank: int) -> Tensor:
            return tensor.detach()[layout.slices(rank, tuple(tensor.shape))].clone()

        return block(0) if self.mode is None else self.mode.rank_map(block)

    def place_all(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
        """Shard parameters as stored, and buffers and leaves of a call in their initial layouts.

        Args:
            parameters, buffers: full tensors by name.
        """
        graph = self.partitioned.graph
        shards = {v.name: self._placed(parameters[v.name], v) for v in graph.parameters}
        state = {v.name: self._placed(buffers[v.name], v) for v in graph.module_buffers}
        leaves = [
            self._placed(leaf, value).requires_grad_(value.differentiable)
            if isinstance(value, Value)
            else leaf
            for value, leaf in zip(graph.inputs, inputs, strict=True)
        ]
        return shards, state, leaves

    def whole(self, tensor: Tensor, layout: TensorLayout, shape: tuple[int, ...]) -> Tensor:
        """Assemble the full tensor from the blocks of all ranks."""
        with _disabled(self.mode):
            blocks = by_rank(tensor) or {0: tensor}
            count = self.partitioned.mesh.num_devices
            if len(blocks) < count:
                blocks = dict.fromkeys(range(count), tensor)
            full, difference = assemble_shards(blocks, layout, shape)
            self.difference = max(self.difference, difference)
            return full

    def outcome(
        self,
        outputs: list[Any],
        gradients: Mapping[str, Tensor],
        updates: Mapping[str, Tensor],
        stage_bytes: Sequence[tuple[int, int]],
    ) -> Outcome:
        """Assemble the results of a step.

        Args:
            outputs: full outputs.
            gradients, updates: sharded tensors by name.
        """
        graph = self.partitioned.graph
        by_name = {value.name: value for value in (*graph.parameters, *graph.buffers)}

        def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: self.whole(t.detach(), self._layout(by_name[name]), by_name[name].shape)
                for name, t in tensors.items()
            }

        collected = whole(gradients), whole(updates)
        return Outcome(outputs, *collected, self.difference, tuple(stage_bytes))

    def _placed(self, tensor: Tensor, value: Value) -> Tensor:
        return self.place(tensor, self._layout(value))

    def _layout(self, value: Value) -> TensorLayout:
        return initial_layout(value, self.partitioned.mesh, self.partitioned.decisions)


@contextmanager
def simulated_ranks(partitioned: Partitioned) -> Iterator[Ranks]:
    """Context with the simulated ranks of one stage; restores PyTorch's random generators.

    Raises:
        PlanError: if a real process group is running.
    """
    with torch.random.fork_rng(), simulated_devices(partitioned.mesh) as (devices, mode):
        yield Ranks(partitioned, devices, mode)


def simulate(
    partitioned: Partitioned,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    *,
    seed: int = 0,
    output_gradients: Sequence[Tensor | None] | None = None,
) -> Outcome:
    """Run forward and backward of the planned program on the simulated ranks of its mesh.

    Args:
        partitioned: in one stage.
        parameters, buffers: full tensors by name.
        inputs: leaves of the call's arguments.
        output_gradients: one for each output value, None for those without; by default 1 for the
            graph's loss. Bytes are counted with those of `graph.trained` only.
    """
    # Outside of the simulation, where `torch.ones` makes one tensor, not one per rank.
    starts = _of_loss(partitioned.graph) if output_gradients is None else output_gradients
    with simulated_ranks(partitioned) as ranks:
        graph, (chunk,) = ranks.partitioned.graph, ranks.partitioned.chunks
        program, communication = lower(chunk, ranks.devices), chunk.communication
        shards, state, leaves = ranks.place_all(parameters, buffers, inputs)
        for value in graph.parameters:
            shards[value.name].requires_grad_(value.differentiable)
        with ByteCounter() as forward:  # type: ignore[no-untyped-call]
            results, updates = program(shards, state, leaves, seed)
        ends = _ends(ranks, communication, results, starts)
        trained = [end for end in ends if end.value in graph.trained]
        with ByteCounter() as backward:  # type: ignore[no-untyped-call]
            _backward(trained, retain_graph=len(trained) < len(ends))
        if len(trained) < len(ends):
            for shard in shards.values():
                shard.grad = None
            _backward(ends)
        outputs = [
            ranks.whole(tensor.detach(), communication.returned(value), value.shape)
            if isinstance(value, Value)
            else tensor
            for value, tensor in zip(graph.outputs, results, strict=True)
        ]
        gradients = {name: t.grad for name, t in shards.items() if t.grad is not None}
        changed = {b.name: t for (b, _), t in zip(graph.updates, updates, strict=True)}
        return ranks.outcome(outputs, gradients, changed, [(forward.sent, backward.sent)])


def simulate_step(
    partitioned: Partitioned,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    *,
    seed: int = 0,
) -> Outcome:
    """Run one training step with all its micro-batches on the simulated ranks of its mesh.

    Args:
        partitioned: in one stage.
        parameters, buffers: full tensors by name.
        inputs: leaves of the call's arguments, with the whole batch.
    """
    with simulated_ranks(partitioned) as ranks:
        step = GradientAccumulation(ranks.partitioned, ranks.devices)
        placed = StepInputs(*ranks.place_all(parameters, buffers, inputs), seed)
        with ByteCounter() as during:  # type: ignore[no-untyped-call]
            loss, updates = step.run(placed)
        with ByteCounter() as after:  # type: ignore[no-untyped-call]
            gradients = step.unsharded.end_step()
        sent = during.sent - during.backward, during.backward + after.sent
        total = ranks.whole(loss, partitioned.mesh.replicated(0), ())
        return ranks.outcome([total], gradients, updates, [sent])


def assemble_shards(
    blocks: Mapping[int, Tensor], layout: TensorLayout, shape: tuple[int, ...]
) -> tuple[Tensor, float]:
    """Assemble a full tensor from the ranks' blocks; returns it and the largest difference between
    replicas."""
    mesh = layout.layout
    full = torch.zeros(shape, dtype=blocks[0].dtype)
    copies: dict[tuple[int, ...], Tensor] = {}
    difference = 0.0
    own = tuple(sorted(layout.sharded | layout.partial))
    for place in product(*(range(size) for size in mesh.device_matrix)):
        rank = rank_at(mesh, place)
        key = tuple(place[axis] for axis in own)
        if key not in copies:
            copies[key] = blocks[rank]
            full[layout.slices(rank, shape)] += blocks[rank]
        elif blocks[rank].numel():
            mine, other = blocks[rank], copies[key]
            exact = not (mine.is_floating_point() or mine.is_complex())
            gap = (mine.double() - other.double() if exact else mine - other).abs().max().item()
            difference = max(difference, gap)
    return full, difference


def rank_at(layout: DeviceMatrix, place: tuple[int, ...]) -> int:
    """The rank with these coordinates on the device matrix."""
    number = 0
    for coordinate, size in zip(place, layout.device_matrix, strict=True):
        number = number * size + coordinate
    return layout.ranks[number]


def _of_loss(graph: Graph) -> list[Tensor | None]:
    """Gradients of the outputs if only the loss is trained: 1 for its first occurrence."""
    outputs = graph.output_values
    place = outputs.index(graph.loss) if graph.loss is not None else None
    return [torch.ones((), dtype=v.dtype) if n == place else None for n, v in enumerate(outputs)]


@dataclass(frozen=True)
class _GradientStart:
    """An output and the gradient that the backward pass starts from, in the output's layout."""

    value: Value
    tensor: Tensor
    gradient: Tensor


def _ends(
    ranks: Ranks,
    communication: Communication,
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
) -> list[_GradientStart]:
    """Outputs with the gradients they start from. The gradient of a partial sum is replicated."""
    graph, mesh = ranks.partitioned.graph, ranks.partitioned.mesh
    pairs = [(v, t) for v, t in zip(graph.outputs, outputs, strict=True) if isinstance(v, Value)]
    ends = []
    for (value, tensor), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None and tensor.requires_grad:
            layout = TensorLayout(mesh, communication.returned(value).axes)
            ends.append(_GradientStart(value, tensor, ranks.place(gradient, layout)))
    return ends


def _backward(ends: Sequence[_GradientStart], retain_graph: bool = False) -> None:
    tensors, gradients = [end.tensor for end in ends], [end.gradient for end in ends]
    if ends:
        torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)


@contextmanager
def _disabled(mode: LocalTensorMode | None) -> Iterator[None]:
    if mode is None:
        yield
        return
    with mode.disable():
        yield


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes that one device sends in collectives.

    `backward` counts those called by autograd in a backward pass; `sent` counts all.

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
    """Bytes that one device sends in a functional collective."""
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

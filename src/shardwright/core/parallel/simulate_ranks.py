"""Run a program on simulated ranks in one process.

PyTorch's `LocalTensorMode` keeps one tensor per rank and computes the collectives between them. So
tests run the same program as real processes, with its collectives and gradients, and measure the
communication volume of the program.
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

from shardwright.core.graph.graph import Graph, Value, WholeBatch
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.lower.emit_program import lower
from shardwright.core.parallel.byte_counter import ByteCounter
from shardwright.core.parallel.train_step import GradientAccumulation, StepInputs
from shardwright.core.partition.communication import Communication, initial_layout
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices, Index
from shardwright.core.torch_internals.distributed import FakeStore
from shardwright.core.torch_internals.local_tensors import (
    LocalTensorMode,
    int_by_rank,
    tensors_by_rank,
)
from shardwright.errors import PlanError


@dataclass(frozen=True)
class Outcome:
    """Results of a simulated step, assembled from all ranks.

    Args:
        outputs: leaves of the model's outputs, as full tensors.
        gradients: full gradients of the parameters that have one.
        updates: new values of buffers, as full tensors by name.
        replica_difference: maximum absolute difference between replicas of any tensor.
        stage_bytes: for each stage, the bytes that one of its devices sent: (forward, backward).
    """

    outputs: list[Any]
    gradients: dict[str, Tensor]
    updates: dict[str, Tensor]
    replica_difference: float
    stage_bytes: tuple[tuple[int, int], ...]


@contextmanager
def simulated_devices(layout: DeviceMatrix) -> Iterator[tuple[Devices, LocalTensorMode | None]]:
    """Context of simulated ranks on a fake process group.

    Args:
        layout: device matrix of the ranks.

    Yields:
        (the devices, the `LocalTensorMode` of the ranks); the mode is None with one device.

    Raises:
        PlanError: if a real process group is running.
    """
    cpu = torch.device("cpu")
    # `LocalTensorMode` would only slow one rank down.
    if layout.num_devices == 1:
        yield Devices.of_process(layout, cpu), None
        return
    if dist.is_initialized():
        raise PlanError(
            "ranks cannot be simulated while a process group is running\n"
            "simulate before `init_process_group`, or after `destroy_process_group`"
        )
    size = layout.num_devices
    coordinates = [layout.coordinates(rank) for rank in range(size)]

    def per_rank(value_at: Callable[[tuple[int, ...]], int]) -> Index:
        return int_by_rank(
            {rank: value_at(coordinate) for rank, coordinate in enumerate(coordinates)}
        )

    # PyTorch's fake backend communicates nothing; `LocalTensorMode` computes the collectives.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mode = LocalTensorMode(size)
        with mode:
            yield Devices(layout, cpu, per_rank, connected=True), mode
    finally:
        dist.destroy_process_group()


@dataclass
class Ranks:
    """Simulated ranks; shards the tensors of a model over them, and assembles results.

    Args:
        partitioned: the partitioned model; its constants become one copy per rank.
        devices: the simulated devices.
        mode: the `LocalTensorMode` of the ranks; None with one device.
        replica_difference: maximum absolute difference between replicas of assembled tensors.
    """

    partitioned: Partitioned
    devices: Devices
    mode: LocalTensorMode | None
    replica_difference: float = 0.0

    def __post_init__(self) -> None:
        # Each rank slices its block of a constant, so each rank needs a copy.
        graph = self.partitioned.graph
        whole_batch = graph.whole_batch
        if isinstance(whole_batch, WholeBatch) and whole_batch.prologue is not None:
            prologue = self._copy_constants_to_ranks(whole_batch.prologue)
            whole_batch = replace(whole_batch, prologue=prologue)
        graph = replace(self._copy_constants_to_ranks(graph), whole_batch=whole_batch)
        self.partitioned = replace(self.partitioned, graph=graph)

    def shard(self, tensor: Tensor, layout: TensorLayout) -> Tensor:
        """Shard a full tensor over the ranks; return one `LocalTensor` with all shards."""

        def block(rank: int) -> Tensor:
            # Cloned, so that an in-place change on one rank does not reach the other ranks.
            return tensor.detach()[layout.slices(rank, tuple(tensor.shape))].clone()

        return block(0) if self.mode is None else self.mode.rank_map(block)

    def _copy_constants_to_ranks(self, graph: Graph) -> Graph:
        replicated = self.partitioned.mesh.replicated
        constants = {v: self.shard(t, replicated(t.ndim)) for v, t in graph.constants.items()}
        return replace(graph, constants=constants)

    def shard_inputs(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
        """Shard the tensors of a step over the ranks: parameters in their storage layouts, the
        others in their initial layouts.

        Args:
            parameters, buffers: full tensors by name.
            inputs: leaves of the call's arguments.
        """
        graph = self.partitioned.graph
        shards = {
            v.name: self._shard_in_initial_layout(parameters[v.name], v) for v in graph.parameters
        }
        state = {
            v.name: self._shard_in_initial_layout(buffers[v.name], v) for v in graph.module_buffers
        }
        # Steps read numbers and tensors of the captured Python state as buffers.
        current = graph.python.current if graph.python is not None else frozenset()
        state |= {v.name: t for v, t in graph.constants.items() if v.name in current}
        leaves = [
            self._shard_in_initial_layout(leaf, value).requires_grad_(value.differentiable)
            if isinstance(value, Value)
            else leaf
            for value, leaf in zip(graph.inputs, inputs, strict=True)
        ]
        return shards, state, leaves

    def assemble(self, tensor: Tensor, layout: TensorLayout, shape: tuple[int, ...]) -> Tensor:
        """Assemble a full tensor of shape `shape` from the shards of all ranks; partial sums are
        added up.

        Args:
            tensor: a `LocalTensor` with the shards.
            layout: layout of the full tensor.
            shape: shape of the full tensor.
        """
        # The blocks are ordinary tensors of single ranks, on which the mode would run once per
        # rank.
        with _without_local_tensor_mode(self.mode):
            blocks = tensors_by_rank(tensor) or {0: tensor}
            count = self.partitioned.mesh.num_devices
            # A tensor that depends on no rank is one ordinary tensor for all ranks.
            if len(blocks) < count:
                blocks = dict.fromkeys(range(count), tensor)
            full, replica_difference = assemble_shards(blocks, layout, shape)
            self.replica_difference = max(self.replica_difference, replica_difference)
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
            stage_bytes: for each stage, the bytes that one of its devices sent: (forward,
                backward).
        """
        graph = self.partitioned.graph
        by_name = {value.name: value for value in (*graph.parameters, *graph.buffers)}

        def assemble_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: self.assemble(
                    t.detach(), self._get_initial_layout(by_name[name]), by_name[name].shape
                )
                for name, t in tensors.items()
            }

        collected = assemble_all(gradients), assemble_all(updates)
        return Outcome(outputs, *collected, self.replica_difference, tuple(stage_bytes))

    def _shard_in_initial_layout(self, tensor: Tensor, value: Value) -> Tensor:
        return self.shard(tensor, self._get_initial_layout(value))

    def _get_initial_layout(self, value: Value) -> TensorLayout:
        return initial_layout(value, self.partitioned.mesh, self.partitioned.decisions)


@contextmanager
def simulated_ranks(partitioned: Partitioned) -> Iterator[Ranks]:
    """Context with the simulated ranks of one stage; restores PyTorch's random generators.

    Raises:
        PlanError: if a real process group is running.
    """
    with torch.random.fork_rng(), simulated_devices(partitioned.mesh) as (devices, mode):
        # Simulated ranks seed the generator of this process.
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
        partitioned: the model, in one stage.
        parameters, buffers: full tensors by name.
        inputs: leaves of the call's arguments.
        seed: seed of the random operators.
        output_gradients: for each output tensor its full gradient, from which the backward pass
            starts, or None; by default 1 for the loss. Bytes are counted only in the backward pass
            from the outputs in `graph.trained`, whose communication the plan predicts.
    """
    # Outside of the simulation, in which `torch.ones` would make one tensor per rank.
    root_gradients = (
        _make_loss_gradients(partitioned.graph) if output_gradients is None else output_gradients
    )
    with simulated_ranks(partitioned) as ranks:
        graph, (chunk,) = ranks.partitioned.graph, ranks.partitioned.chunks
        program, communication = lower(chunk, ranks.devices), chunk.communication
        shards, state, leaves = ranks.shard_inputs(parameters, buffers, inputs)
        for value in graph.parameters:
            shards[value.name].requires_grad_(value.differentiable)
        with ByteCounter() as forward:  # type: ignore[no-untyped-call]
            results, updates = program(shards, state, leaves, seed)
        starts = _pair_outputs_with_gradients(ranks, communication, results, root_gradients)
        trained = [start for start in starts if start.value in graph.trained]
        # The plan predicts the communication of the loss's gradients. Gradients of other outputs
        # need a second backward pass, which starts from all outputs.
        with ByteCounter() as backward:  # type: ignore[no-untyped-call]
            _run_backward_from_outputs(trained, retain_graph=len(trained) < len(starts))
        if len(trained) < len(starts):
            # The first backward pass has accumulated gradients of the loss alone.
            for shard in shards.values():
                shard.grad = None
            _run_backward_from_outputs(starts)
        outputs = [
            ranks.assemble(tensor.detach(), communication.returned_layout(value), value.shape)
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
        partitioned: the model, in one stage.
        parameters, buffers: full tensors by name.
        inputs: leaves of the call's arguments, for the global batch.
        seed: random seed of the step.
    """
    with simulated_ranks(partitioned) as ranks:
        step = GradientAccumulation(ranks.partitioned, ranks.devices)
        step_inputs = StepInputs(
            *ranks.shard_inputs(parameters, buffers, inputs), seed, partitioned.pipeline.batch_dims
        )
        with ByteCounter() as during:  # type: ignore[no-untyped-call]
            results = step.run(step_inputs)
        with ByteCounter() as after:  # type: ignore[no-untyped-call]
            gradients = step.unsharded.end_step()
        # Forward is the rest: `run` has both passes, `end_step` only reductions of gradients.
        sent = during.sent - during.backward, during.backward + after.sent
        total = ranks.assemble(results.loss, partitioned.mesh.replicated(0), ())
        return ranks.outcome([total], gradients, results.buffers, [sent])


def assemble_shards(
    blocks: Mapping[int, Tensor], layout: TensorLayout, shape: tuple[int, ...]
) -> tuple[Tensor, float]:
    """Assemble a full tensor from the shards of all ranks.

    Args:
        blocks: the shard of each rank.
        layout: layout of the full tensor; partial sums are added up.
        shape: shape of the full tensor.

    Returns:
        The full tensor, and the maximum absolute difference between replicas of a shard.
    """
    mesh = layout.layout
    full = torch.zeros(shape, dtype=blocks[0].dtype)
    copies: dict[tuple[int, ...], Tensor] = {}
    largest_difference = 0.0
    # Ranks that differ only along other axes are replicas.
    distinct_axes = tuple(sorted(layout.sharded | layout.partial))
    for coordinates in product(*(range(size) for size in mesh.device_matrix)):
        rank = rank_at(mesh, coordinates)
        key = tuple(coordinates[axis] for axis in distinct_axes)
        if key not in copies:
            copies[key] = blocks[rank]
            slices = layout.slices(rank, shape)
            # Blocks of a partial sum are terms of the same slice. Others are not added, as unsigned
            # integers have no addition.
            full[slices] = full[slices] + blocks[rank] if layout.partial else blocks[rank]
        # `max` of an empty tensor raises.
        elif blocks[rank].numel():
            block, first_copy = blocks[rank], copies[key]
            # As double, since bool has no subtraction and unsigned integers wrap around.
            is_integral = not (block.is_floating_point() or block.is_complex())
            block_difference = (
                (block.double() - first_copy.double() if is_integral else block - first_copy)
                .abs()
                .max()
                .item()
            )
            largest_difference = max(largest_difference, block_difference)
    return full, largest_difference


def rank_at(layout: DeviceMatrix, coordinates: tuple[int, ...]) -> int:
    """Return the rank at `coordinates` of a device matrix."""
    index = 0
    for coordinate, size in zip(coordinates, layout.device_matrix, strict=True):
        # Row-major: the last axis varies fastest.
        index = index * size + coordinate
    return layout.ranks[index]


def _make_loss_gradients(graph: Graph) -> list[Tensor | None]:
    """Return the gradient of each output: 1 for the first occurrence of the loss, else None."""
    outputs = graph.output_values
    loss_index = outputs.index(graph.loss) if graph.loss is not None else None
    return [
        torch.ones((), dtype=v.dtype) if index == loss_index else None
        for index, v in enumerate(outputs)
    ]


@dataclass(frozen=True)
class _BackwardStart:
    """An output from which a backward pass starts, and its gradient, as local tensors of all
    ranks."""

    value: Value
    tensor: Tensor
    gradient: Tensor


def _pair_outputs_with_gradients(
    ranks: Ranks,
    communication: Communication,
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
) -> list[_BackwardStart]:
    """Return the outputs that require a gradient, with their gradients sharded like the outputs.

    The gradient of a partial sum is replicated over the axes of the sum.
    """
    graph, mesh = ranks.partitioned.graph, ranks.partitioned.mesh
    pairs = [(v, t) for v, t in zip(graph.outputs, outputs, strict=True) if isinstance(v, Value)]
    starts = []
    for (value, tensor), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None and tensor.requires_grad:
            # Without the partial axes of the output: each term of a sum gets the full gradient.
            layout = TensorLayout(mesh, communication.returned_layout(value).axes)
            starts.append(_BackwardStart(value, tensor, ranks.shard(gradient, layout)))
    return starts


def _run_backward_from_outputs(
    starts: Sequence[_BackwardStart], retain_graph: bool = False
) -> None:
    tensors, gradients = [start.tensor for start in starts], [start.gradient for start in starts]
    if starts:
        torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)


@contextmanager
def _without_local_tensor_mode(mode: LocalTensorMode | None) -> Iterator[None]:
    if mode is None:
        yield
        return
    with mode.disable():
        yield

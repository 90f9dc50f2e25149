"""Dry run: runs the program of a chunk on the meta device to measure its memory.

It is the program that a rank will run, forward and backward through PyTorch's own autograd. Its
tensors have shapes and lifetimes but no data, so a model of any size takes about a second. Nothing
has to be modeled: what operators save for backward and when it is freed, how gradients accumulate,
what buckets and recomputed segments take. Chunks that differ only in names run once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwright.core.cost.pipeline_timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
)
from shardwright.core.cost.tensor_tracking import (
    META,
    PARAMETERS,
    WEIGHTS,
    DryRunMode,
    FusedAttention,
    LiveBytes,
    TrackedStorage,
    bytes_by_kind,
    events_at_peak,
)
from shardwright.core.graph.graph import Value
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.lower.program import lower
from shardwright.core.parallel.pipeline_stage import StageModule, StepContext, can_split_backward
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.chunk_key import chunk_key
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.pipelining import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from shardwright.progress import OnShare, ignore_share, subrange, track

BATCH, BUFFERS, GRADIENTS, ACTIVATIONS = "batch", "buffers", "gradients", "activations"
TEMPORARY = ""

LARGEST = 8
"""Number of largest tensors at a peak that are listed individually."""

Kinds = Mapping[str, int]
"""Bytes by kind: `parameters` as stored, the `batch` (inputs of a micro-batch, and what stages
receive for it), `buffers` and constants, `weights` (gathered or cast parameters), `gradients` of
parameters, `activations` saved for backward, and temporary tensors: gradients of activations, flat
buffers of collectives, intermediate results."""


@dataclass(frozen=True)
class Phase:
    """Memory of one action relative to its start.

    Args:
        peak: bytes at the peak of the action.
        change: bytes at its end; negative where it frees.
        largest: largest tensors of the micro-batch at the peak: kind, index of the operator that
            produces or first reads them, and bytes.
    """

    peak: Kinds
    change: Kinds
    largest: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class DryRun:
    """Memory of one chunk on one device over a step.

    Args:
        stock: bytes before the step; of the batch, one micro-batch.
        begin: start of the step, where parameters may be gathered.
        first: actions of the first micro-batch, by kind.
        later: actions of later micro-batches, which accumulate into existing gradients.
        end: end of the step, where gradients are reduced.
    """

    stock: Kinds
    begin: Phase
    first: Mapping[str, Phase]
    later: Mapping[str, Phase]
    end: Phase


def dry_run_chunk(
    partitioned: Partitioned,
    chunk: Chunk,
    kinds: Sequence[str],
    cached_results: dict[Any, Any],
    on_share: OnShare = ignore_share,
) -> DryRun:
    """Dry-run one chunk of a model.

    Args:
        kinds: kinds of the actions of one micro-batch, in order.
        cached_results: cached results of operators by their arguments; see `DryRunMode`.
        on_share: receives the share of lowering and of the actions that is done.
    """
    run = _MetaChunk.of(partitioned, chunk, BACKWARD_INPUT in kinds, cached_results)
    with run.live, FusedAttention():
        stock = run.live.bytes_between(run.mark(BUFFERS))
        begin = run.phase(run.begin, WEIGHTS)
        runs = subrange(on_share, 1, 1 + len(kinds), size=len(kinds))
        first, later = run.actions(kinds, partitioned.pipeline.micro_batches > 1, runs)
        end = run.phase(run.end, GRADIENTS)
    return DryRun(stock, begin, first, later, end)


@dataclass
class _MetaChunk:
    """A chunk on the meta device.

    Args:
        stored: stored parameters by name.
        arriving: values received from the chunk before.
        gradients: gradients received from the chunk after.
        splits_backward: whether the backward pass is split into input and weight gradients.
        inputs, outputs: inputs and outputs of the current micro-batch.
        groups: parameter groups of `stage_backward_input` for its `stage_backward_weight`.
        reduced: gradients of stored parameters after the step.
        added: gradients accumulated in this pass, each with the length of the history at that time.
    """

    module: StageModule
    stored: dict[str, Tensor]
    arriving: list[Tensor]
    gradients: list[Tensor]
    splits_backward: bool
    live: LiveBytes
    number: Tensor = field(default_factory=lambda: torch.tensor(0))
    outputs: tuple[Tensor, ...] = ()
    inputs: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    reduced: dict[str, Tensor] = field(default_factory=dict)
    added: list[tuple[int, TrackedStorage]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        partitioned: Partitioned,
        chunk: Chunk,
        splits_backward: bool,
        cached_results: dict[Any, Any],
    ) -> _MetaChunk:
        mesh = chunk.mesh
        # The last rank needs most: under causal attention its block of queries reads most keys.
        coordinates = mesh.coordinates(mesh.ranks[-1])
        devices = Devices(mesh, META, lambda function: function(coordinates))
        constants = {value: tensor.to(META) for value, tensor in chunk.graph.constants.items()}
        if constants:
            chunk = replace(chunk, graph=replace(chunk.graph, constants=constants))
        # With a single chunk and micro-batch, the program itself gathers parameters.
        is_whole_model = not chunk.arriving and not chunk.leaving
        unsharded = partitioned.pipeline.micro_batches > 1 or not is_whole_model
        program = lower(chunk, devices, unsharded)
        module = StageModule(chunk, program, partitioned.graph)
        layouts = program.communication.initial_layouts

        def local(value: Value, dtype: torch.dtype | None = None) -> Tensor:
            shape = layouts[value].shard_shape(value.shape)
            return torch.empty(shape, dtype=dtype or value.dtype, device=META)

        arriving = [local(v).requires_grad_(v.requires_grad) for v in chunk.arriving]
        gradient_buffers = [_gradient_buffer(chunk, value) for value in chunk.leaving]
        run = cls(
            module,
            {v.name: local(v, v.stored_dtype) for v in chunk.graph.parameters},
            arriving,
            gradient_buffers,
            splits_backward and can_split_backward(module),
            DryRunMode(cached_results),
        )
        chunk_inputs = set(chunk.graph.input_values)
        leaves = [
            local(leaf, leaf.stored_dtype)
            if isinstance(leaf, Value) and leaf in chunk_inputs
            else leaf
            for leaf in partitioned.graph.inputs
        ]
        buffers = {value.name: local(value) for value in chunk.graph.buffers}
        module.step = StepContext([leaves], buffers, seed=0, global_batch_values=[{}])
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        run.live.watch([*tensors, *arriving, *gradient_buffers], BATCH)
        run.live.watch(run.stored.values(), PARAMETERS)
        run.live.watch([*constants.values(), *buffers.values()], BUFFERS)
        return run

    def mark(self, kind: str) -> int:
        """Label all unlabeled live tensors, and return the length of the history."""
        self.live.label(kind)
        return len(self.live.history)

    def phase(self, function: Callable[[], None], kind: str) -> Phase:
        """Run a function and measure it; tensors that it leaves are of `kind`."""
        start = len(self.live.history)
        function()
        end = self.mark(kind)
        peak = self.live.peak(start, end)
        peak_bytes, change = (
            self.live.bytes_between(peak, start),
            self.live.bytes_between(end, start),
        )
        return Phase(peak_bytes, change, self._largest(peak))

    def actions(
        self, kinds: Sequence[str], has_several: bool, on_share: OnShare
    ) -> tuple[dict[str, Phase], dict[str, Phase]]:
        """Run the actions of the first micro-batch and, if there are several, of a later one.

        Usually only the later one runs, and the first is derived from it by `_first_from_later`,
        which halves the time of a dry run.
        """
        if self.splits_backward or not has_several:
            first = {kind: self.action(kind) for kind in track(kinds, on_share)}
            return first, {kind: self.action(kind) for kind in kinds} if has_several else {}
        first, later = {}, {}
        for kind in track(kinds, on_share):
            start = len(self.live.history)
            if kind == FORWARD:
                # Gathers finish in the first micro-batch, not in a later one.
                self.module.unsharded.tensors()
            later[kind] = self.action(kind)
            first[kind] = self._first_from_later(start, later[kind])
            if kind == FORWARD:
                self._add_gradients()
        return first, later

    def _first_from_later(self, start: int, later: Phase) -> Phase:
        """Derive the first micro-batch's phase from a later one's, with events since `start`.

        The later one adds to an existing gradient and frees its own right after; the first keeps
        its own. So an allocation of the gradient is inserted at each accumulation.
        """
        events = self.live.history[start:]
        for position, gradient in reversed(self.added):
            # After the event that frees the added tensor.
            events.insert(position + 1 - start, (gradient, True))
        self.added.clear()
        peak_bytes = bytes_by_kind(events[: events_at_peak(events)])
        return Phase(peak_bytes, bytes_by_kind(events), later.largest)

    def _add_gradients(self) -> None:
        """Give each parameter that the backward pass reaches a gradient, as an earlier micro-batch
        would have left it."""
        leaves = {id(leaf) for leaf in self.module.unsharded.leaves()}
        for leaf in filter(lambda leaf: id(leaf) in leaves, _reached_leaves(self.outputs)):
            leaf.grad = torch.empty(leaf.shape, dtype=leaf.dtype, device=META)
            self.live.watch([leaf.grad], GRADIENTS)
            gradient = self.live.storage_of(leaf.grad)
            # The hook runs when the gradient has been added: `_first_from_later` inserts it there.
            leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, gradient=gradient: self.added.append((len(self.live.history), gradient))
            )

    def _largest(self, num_events: int) -> tuple[tuple[str, int, int], ...]:
        """The largest tensors after `num_events` events, summed by kind and operator."""
        sizes: dict[tuple[str, int], int] = {}
        for (kind, line), size in self.live.bytes_by_line(num_events).items():
            if line in self._operators and size:
                key = kind, self._operators[line]
                sizes[key] = sizes.get(key, 0) + size
        largest = sorted(sizes.items(), key=lambda entry: -entry[1])[:LARGEST]
        return tuple((*key, size) for key, size in largest)

    @cached_property
    def _operators(self) -> dict[int, int]:
        """Index of the operator of each program line; a redistribution belongs to the operator
        after it."""
        indices = {op.name: index for index, op in enumerate(self.module.chunk.graph.ops)}
        operators: dict[int, int] = {}
        next_operator: int | None = None
        lines = self.module.program.source.splitlines()
        # The program has a comment with the operator's name above each operator's line.
        for line_number, text in reversed(list(enumerate(lines, start=1))):
            name = re.match(r"\s*# (.*?)[:;]", text)
            if name is not None and name[1] in indices:
                operators[line_number + 1] = next_operator = indices[name[1]]
            elif next_operator is not None:
                operators[line_number] = next_operator
        return operators

    def action(self, kind: str) -> Phase:
        """Run an action of one micro-batch."""
        function = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
        }[kind]
        return self.phase(function, ACTIVATIONS if kind in (FORWARD, BACKWARD_INPUT) else GRADIENTS)

    def begin(self) -> None:
        self.module.unsharded.begin_step(self.stored)

    def end(self) -> None:
        self.reduced = self.module.unsharded.end_step()

    def forward(self) -> None:
        self.inputs = [
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.arriving
        ]
        if self.module.chunk.graph.loss is None and not self.module.chunk.leaving:
            self.outputs = self._differentiable_outputs()
            return
        outputs = self.module(*self.inputs, number=self.number)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def _differentiable_outputs(self) -> tuple[Tensor, ...]:
        """Outputs of a model without a loss from which its user may start a backward pass."""
        module, step = self.module, self.module.step
        tensors = module.unsharded.tensors()
        outputs, _ = module.program(tensors, step.buffers, module.read(0, self.inputs))
        return tuple(t for t in outputs if isinstance(t, Tensor) and t.requires_grad)

    def _take_tensors(self) -> tuple[tuple[Tensor, ...], list[Tensor] | None, list[Tensor]]:
        """Return outputs, their gradients and inputs, and drop the references to them, so that
        the backward pass frees them as a schedule does."""
        tensors = self.outputs, self.gradients or None, self.inputs
        self.outputs, self.inputs = (), []
        return tensors

    def backward(self) -> None:
        outputs, gradients, inputs = self._take_tensors()
        if gradients:
            stage_backward(outputs, gradients, inputs)
        # A model without a loss: its caller passes a gradient for each output.
        elif outputs:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])

    def backward_input(self) -> None:
        # The first chunk has no inputs to differentiate: its pass runs in `backward_weight`.
        if not self.splits_backward:
            self.backward()
        elif self.module.chunk.number:
            outputs, gradients, inputs = self._take_tensors()
            _, self.groups = stage_backward_input(
                list(outputs), gradients, inputs, self.module.parameters()
            )

    def backward_weight(self) -> None:
        if self.splits_backward and self.module.chunk.number:
            groups, self.groups = self.groups, []
            stage_backward_weight(self.module.parameters(), groups)
        elif self.splits_backward:
            self.backward()


def _reached_leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Leaf tensors that a backward pass from `outputs` reaches."""
    pending: list[Any] = [output.grad_fn for output in outputs]
    seen = {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf


def _gradient_buffer(chunk: Chunk, value: Value) -> Tensor:
    """Buffer that receives the gradient of a value sent to the next chunk."""
    layout = TensorLayout(chunk.mesh, chunk.decisions.departures[value.name])
    return torch.empty(layout.shard_shape(value.shape), dtype=value.dtype, device=META)


def plus(kinds: Kinds, *others: Kinds) -> Kinds:
    """Sum bytes by kind."""
    names = {name for each in (kinds, *others) for name in each}
    return {name: sum(each.get(name, 0) for each in (kinds, *others)) for name in names}


class DryRunCache:
    """Dry runs by chunk, so that equal chunks of all candidates run once."""

    def __init__(self) -> None:
        self._runs: dict[object, DryRun] = {}
        self._operators: dict[Any, Any] = {}

    def of(
        self,
        partitioned: Partitioned,
        chunk: Chunk,
        kinds: Sequence[str],
        on_share: OnShare = ignore_share,
    ) -> DryRun:
        """Return the dry run of a chunk; arguments as for `dry_run_chunk`."""
        # Of the number of micro-batches, only whether gradients accumulate matters.
        has_several = partitioned.pipeline.micro_batches > 1
        key = (chunk_key(chunk), chunk.mesh, tuple(kinds), has_several)
        if key not in self._runs:
            cached_results = self._operators
            self._runs[key] = dry_run_chunk(partitioned, chunk, kinds, cached_results, on_share)
        return self._runs[key]

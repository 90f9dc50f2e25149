"""Runs the program of a chunk without data, to see how many bytes it needs.

The very program that a rank will run runs on the meta device, forward and backward, through
PyTorch's own autograd. Its tensors have shapes and lifetimes, but no memory and no numbers, so a
model of any size takes about a second, and nothing has to be modeled: what operators save for their
backward pass and when it is freed, how gradients add up, what buckets and recomputed segments take.
Chunks that are alike but for their names run once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwright.core.cost.pipeline_timeline import BACKWARD, FORWARD, OF_INPUT, OF_WEIGHT
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
from shardwright.core.parallel.pipeline_stage import StageModule, StepContext, may_halve
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
"""Tensors of a moment that are told apart."""

Kinds = Mapping[str, int]
"""Bytes by kind: `parameters` as stored, the `batch` (of each micro-batch what is given and
received), `buffers` and constants, `weights` (gathered or cast parameters), `gradients` of
parameters, `activations` that are kept for the backward pass, and temporary ones: gradients of
activations, flat buffers, results that nothing keeps."""


@dataclass(frozen=True)
class Phase:
    """What an action needs beyond what was there before it.

    Args:
        height: at the moment when it needs most.
        change: what it leaves; less than nothing where it frees.
        largest: at that moment, of what one micro-batch has made: kind, the number of the operator
            that makes or first reads it, and bytes.
    """

    height: Kinds
    change: Kinds
    largest: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class DryRun:
    """What one chunk needs on one device.

    Args:
        stock: before the step; of the batch one micro-batch.
        begin, end: of the step.
        first: the actions of the first micro-batch, by kind.
        later: of those that find gradients to add theirs to.
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
    known: dict[Any, Any],
    on_share: OnShare = ignore_share,
) -> DryRun:
    """Runs one chunk of a model for one micro-batch.

    Without stages and with one micro-batch, the program brings parameters to use by itself.

    Args:
        kinds: of the actions of one micro-batch, in order.
        known: results of operators that were met before.
        on_share: of lowering and of the actions.
    """
    run = _MetaChunk.of(partitioned, chunk, OF_INPUT in kinds, known)
    with run.live, FusedAttention():
        stock = run.live.kinds(run.mark(BUFFERS))
        begin = run.phase(run.begin, WEIGHTS)
        runs = subrange(on_share, 1, 1 + len(kinds), size=len(kinds))
        first, later = run.actions(kinds, partitioned.pipeline.micro_batches > 1, runs)
        end = run.phase(run.end, GRADIENTS)
    return DryRun(stock, begin, first, later, end)


@dataclass
class _MetaChunk:
    """One chunk on the meta device.

    Args:
        stored: its parameters, by name.
        arriving, gradients: what it receives, from the chunk before and from the next one.
        halves: whether backward passes come in two halves.
        inputs, outputs: of the micro-batch that is on its way.
        groups: what the second half of its backward pass works on.
        reduced: gradients of stored parameters, once the step has ended.
        added: gradients to which others were added in this pass, each with how far the history had
            come by then.
    """

    module: StageModule
    stored: dict[str, Tensor]
    arriving: list[Tensor]
    gradients: list[Tensor]
    halves: bool
    live: LiveBytes
    number: Tensor = field(default_factory=lambda: torch.tensor(0))
    outputs: tuple[Tensor, ...] = ()
    inputs: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    reduced: dict[str, Tensor] = field(default_factory=dict)
    added: list[tuple[int, TrackedStorage]] = field(default_factory=list)

    @classmethod
    def of(
        cls, partitioned: Partitioned, chunk: Chunk, halves: bool, known: dict[Any, Any]
    ) -> _MetaChunk:
        mesh = chunk.mesh
        # Of causal queries the last block reads the most keys.
        place = mesh.coordinates(mesh.ranks[-1])
        devices = Devices(mesh, META, lambda function: function(place))
        constants = {value: tensor.to(META) for value, tensor in chunk.graph.constants.items()}
        if constants:
            chunk = replace(chunk, graph=replace(chunk.graph, constants=constants))
        alone = not chunk.arriving and not chunk.leaving
        unsharded = partitioned.pipeline.micro_batches > 1 or not alone
        program = lower(chunk, devices, unsharded)
        module = StageModule(chunk, program, partitioned.graph)
        layouts = program.communication.initial_layouts

        def local(value: Value, dtype: torch.dtype | None = None) -> Tensor:
            shape = layouts[value].shard_shape(value.shape)
            return torch.empty(shape, dtype=dtype or value.dtype, device=META)

        arriving = [local(v).requires_grad_(v.requires_grad) for v in chunk.arriving]
        returning = [_returning(chunk, value) for value in chunk.leaving]
        run = cls(
            module,
            {v.name: local(v, v.stored_dtype) for v in chunk.graph.parameters},
            arriving,
            returning,
            halves and may_halve(module),
            DryRunMode(known),
        )
        read = set(chunk.graph.input_values)
        leaves = [
            local(leaf, leaf.stored_dtype) if isinstance(leaf, Value) and leaf in read else leaf
            for leaf in partitioned.graph.inputs
        ]
        buffers = {value.name: local(value) for value in chunk.graph.buffers}
        module.step = StepContext([leaves], buffers, seed=0)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        run.live.watch([*tensors, *arriving, *returning], BATCH)
        run.live.watch(run.stored.values(), PARAMETERS)
        run.live.watch([*constants.values(), *buffers.values()], BUFFERS)
        return run

    def mark(self, kind: str) -> int:
        """What is live and has no kind yet is of this one; how far the history has come."""
        self.live.label(kind)
        return len(self.live.history)

    def phase(self, function: Callable[[], None], leaves: str) -> Phase:
        """Runs something that leaves tensors of a kind."""
        start = len(self.live.history)
        function()
        end = self.mark(leaves)
        peak = self.live.peak(start, end)
        height, change = self.live.kinds(peak, start), self.live.kinds(end, start)
        return Phase(height, change, self._largest(peak))

    def actions(
        self, kinds: Sequence[str], several: bool, on_share: OnShare
    ) -> tuple[dict[str, Phase], dict[str, Phase]]:
        """Runs the actions of the first micro-batch and, if there are several, of a later one."""
        if self.halves or not several:
            first = {kind: self.action(kind) for kind in track(kinds, on_share)}
            return first, {kind: self.action(kind) for kind in kinds} if several else {}
        first, later = {}, {}
        for kind in track(kinds, on_share):
            start = len(self.live.history)
            if kind == FORWARD:
                # The first micro-batch waits for gathers.
                self.module.unsharded.tensors()
            later[kind] = self.action(kind)
            first[kind] = self._as_first(start, later[kind])
            if kind == FORWARD:
                self._add_gradients()
        return first, later

    def _as_first(self, start: int, later: Phase) -> Phase:
        """What has happened since `start`, if each gradient was not there before it was added to:
        the first micro-batch leaves its own."""
        events = self.live.history[start:]
        for place, held in reversed(self.added):
            # What is added is freed right after.
            events.insert(place + 1 - start, (held, True))
        self.added.clear()
        height = bytes_by_kind(events[: events_at_peak(events)])
        return Phase(height, bytes_by_kind(events), later.largest)

    def _add_gradients(self) -> None:
        """Gradients of an earlier micro-batch, of all leaves that a backward pass will reach."""
        leaves = {id(leaf) for leaf in self.module.unsharded.leaves()}
        for leaf in filter(lambda leaf: id(leaf) in leaves, _reached(self.outputs)):
            leaf.grad = torch.empty(leaf.shape, dtype=leaf.dtype, device=META)
            self.live.watch([leaf.grad], GRADIENTS)
            held = self.live.held(leaf.grad)
            leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, held=held: self.added.append((len(self.live.history), held))
            )

    def _largest(self, place: int) -> tuple[tuple[str, int, int], ...]:
        sizes: dict[tuple[str, int], int] = {}
        for (kind, line), size in self.live.lines(place).items():
            if line in self._operators and size:
                key = kind, self._operators[line]
                sizes[key] = sizes.get(key, 0) + size
        largest = sorted(sizes.items(), key=lambda entry: -entry[1])[:LARGEST]
        return tuple((*key, size) for key, size in largest)

    @cached_property
    def _operators(self) -> dict[int, int]:
        """Of each line of the program the number of its operator; of a redistribution, of that
        which comes next. A comment right above its line names an operator."""
        numbers = {op.name: number for number, op in enumerate(self.module.chunk.graph.ops)}
        operators: dict[int, int] = {}
        following: int | None = None
        lines = self.module.program.source.splitlines()
        for place, text in reversed(list(enumerate(lines, start=1))):
            name = re.match(r"\s*# (.*?)[:;]", text)
            if name is not None and name[1] in numbers:
                operators[place + 1] = following = numbers[name[1]]
            elif following is not None:
                operators[place] = following
        return operators

    def action(self, kind: str) -> Phase:
        """Runs an action of one micro-batch."""
        function = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            OF_INPUT: self.of_input,
            OF_WEIGHT: self.of_weight,
        }[kind]
        return self.phase(function, ACTIVATIONS if kind in (FORWARD, OF_INPUT) else GRADIENTS)

    def begin(self) -> None:
        self.module.unsharded.begin_step(self.stored)

    def end(self) -> None:
        self.reduced = self.module.unsharded.end_step()

    def forward(self) -> None:
        self.inputs = [
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.arriving
        ]
        if self.module.chunk.graph.loss is None and not self.module.chunk.leaving:
            self.outputs = self._returned()
            return
        outputs = self.module(*self.inputs, number=self.number)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def _returned(self) -> tuple[Tensor, ...]:
        """The outputs of a model without a loss, which its user differentiates."""
        module, step = self.module, self.module.step
        tensors = module.unsharded.tensors()
        outputs, _ = module.program(tensors, step.buffers, module.read(0, self.inputs))
        return tuple(t for t in outputs if isinstance(t, Tensor) and t.requires_grad)

    def _taken(self) -> tuple[tuple[Tensor, ...], list[Tensor] | None, list[Tensor]]:
        taken = self.outputs, self.gradients or None, self.inputs
        self.outputs, self.inputs = (), []
        return taken

    def backward(self) -> None:
        outputs, gradients, inputs = self._taken()
        if gradients:
            stage_backward(outputs, gradients, inputs)
        elif outputs:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])

    def of_input(self) -> None:
        if not self.halves:
            self.backward()
        elif self.module.chunk.number:
            outputs, gradients, inputs = self._taken()
            _, self.groups = stage_backward_input(
                list(outputs), gradients, inputs, self.module.parameters()
            )

    def of_weight(self) -> None:
        if self.halves and self.module.chunk.number:
            groups, self.groups = self.groups, []
            stage_backward_weight(self.module.parameters(), groups)
        elif self.halves:
            self.backward()


def _reached(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves that a backward pass from `outputs` reaches."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [follower for follower, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf


def _returning(chunk: Chunk, value: Value) -> Tensor:
    """Where the gradient of a value that leaves is received."""
    layout = TensorLayout(chunk.mesh, chunk.decisions.departures[value.name])
    return torch.empty(layout.shard_shape(value.shape), dtype=value.dtype, device=META)


def plus(kinds: Kinds, *others: Kinds) -> Kinds:
    """The sum by kind."""
    every = {kind for each in (kinds, *others) for kind in each}
    return {kind: sum(each.get(kind, 0) for each in (kinds, *others)) for kind in every}


class DryRunCache:
    """What chunks need that ran before."""

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
        """What a chunk needs; the arguments are those of `dry_run_chunk`."""
        several = partitioned.pipeline.micro_batches > 1
        key = (chunk_key(chunk), chunk.mesh, tuple(kinds), several)
        if key not in self._runs:
            known = self._operators
            self._runs[key] = dry_run_chunk(partitioned, chunk, kinds, known, on_share)
        return self._runs[key]

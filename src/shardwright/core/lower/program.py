"""Lowers a chunk to the program of one rank.

The program is Python text over local tensors: the operators of the graph in order, and a
redistribution wherever a value is read in another layout than it was produced in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from shardwright.core.graph.graph import Graph, Kind, Op, Value, ops_from_inputs
from shardwright.core.graph.saved_tensors import returned_before_update, saved_before_update
from shardwright.core.lower.emit import NAMED_RANGE, Source, expression, write_body
from shardwright.core.lower.emit_buckets import BucketLines, cast_name
from shardwright.core.lower.emit_transfers import TransferLines
from shardwright.core.lower.kernels import (
    Kernels,
    leaves_out_results,
    made_results,
    returns_many,
)
from shardwright.core.lower.regions import Compiler, compile_regions
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.parameter_buckets import num_bucketed_steps
from shardwright.core.partition.transfer import Transfer
from shardwright.core.rules import is_random, rule_of
from shardwright.core.rules.rule import Cuts, ShardingRule, TwoPhaseKernel
from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.fake_implementations import CheckedCustomOp
from shardwright.core.runtime.overlap import delayed_linear
from shardwright.core.runtime.random import (
    Seeded,
    recompute_drawing_segment,
    recompute_segment,
    stream_number,
)
from shardwright.core.runtime.regather import BackwardRegather
from shardwright.core.torch_internals.operators import OpOverload

aten = torch.ops.aten

HEADER = "def program(parameters, buffers, inputs, seed):"


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Args:
        source: Python text.
        function: function compiled from it.
        communication: redistributions in it.
        parameters: parameters that the graph reads.
        buckets: buckets of `communication`, bound to this rank's process groups.
        unsharded: whether it reads parameters from `UnshardedParameters` instead of gathering them.
        casts: parameters that an unsharded program reads without a bucket, but in another dtype.
        regather: gathers that the backward pass repeats; None if there are none.
        by_region: returns the function with its repeated blocks compiled once; None without
            repeated blocks.
    """

    source: str
    function: Callable[..., tuple[list[Any], list[Tensor]]]
    communication: Communication
    parameters: tuple[Value, ...]
    buckets: tuple[BoundBucket, ...]
    unsharded: bool = False
    casts: tuple[Value, ...] = ()
    regather: BackwardRegather | None = None
    by_region: Callable[[Compiler], Callable[..., Any] | None] = lambda compiler: None

    def compiled(self, compiler: Compiler, regional: bool) -> Program:
        """Compiles the program; with `regional`, its repeated blocks once as one function."""
        function = self.by_region(compiler) if regional else None
        return replace(self, function=function or compiler(self.function))

    def __call__(
        self,
        parameters: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Any],
        seed: int = 0,
    ) -> tuple[list[Any], list[Tensor]]:
        """Runs the program on local tensors.

        Args:
            parameters: this rank's shards in the plan's storage layout; for an `unsharded` program,
                the result of `UnshardedParameters.tensors`.
            buffers: unsharded buffers.
            inputs: leaves of the call's arguments, with unsharded tensors.
            seed: seed of random operators; the same on all ranks, another one in each step.

        Returns:
            The leaves of the model's outputs, and the new values of the graph's `updates`, in the
            layouts of the old ones.
        """
        if self.regather is None or not torch.is_grad_enabled():
            return self.function(parameters, buffers, inputs, seed)
        with self.regather.run():
            return self.function(parameters, buffers, inputs, seed)

    def __str__(self) -> str:
        return self.source


def lower(
    chunk: Chunk, devices: Devices, unsharded: bool = False, pending_loss: bool = False
) -> Program:
    """Lowers `chunk` to the program of this rank.

    Args:
        unsharded: whether the program reads parameters that `UnshardedParameters` keeps over the
            micro-batches of a step, instead of gathering them itself.
        pending_loss: whether the all-reduce of the loss is started but not finished, as the
            backward pass does not need it; call `collectives.wait` before reading the loss.
    """
    return _Lowering(chunk, devices, unsharded, pending_loss).program()


@dataclass
class _Lowering:
    chunk: Chunk
    devices: Devices
    unsharded: bool
    pending_loss: bool
    buckets: BucketLines = field(init=False)
    source: Source = field(default_factory=Source)
    variables: dict[Value, str] = field(default_factory=dict)
    transfers: TransferLines = field(init=False)
    fused: dict[Value, Op] = field(default_factory=dict)
    kernels: Kernels = field(init=False)
    started: dict[Op, str] = field(default_factory=dict)
    casts: list[Value] = field(default_factory=list)
    read_after_update: frozenset[Value] = frozenset()

    @property
    def graph(self) -> Graph:
        return self.chunk.graph

    @property
    def cuts(self) -> Mapping[str, Cuts]:
        return self.chunk.decisions.cuts

    @property
    def flow(self) -> Communication:
        return self.chunk.communication

    def program(self) -> Program:
        # Reserved, so that no variable hides an argument of the program.
        for name in ("parameters", "buffers", "inputs", "seed", "device"):
            self.source.name(name)
        self.buckets = BucketLines(self.flow, self.devices, self.unsharded, self.source)
        self.kernels = Kernels(self.devices, self.cuts, self.flow)
        self.transfers = TransferLines(
            self.flow,
            self.devices,
            self.source,
            self.chunk.overlaps,
            self._pending_loss(),
            self._weight,
        )
        if self.devices.named_ranges:
            self.source.refer(NAMED_RANGE, record_function)
        recomputed = (self.graph.by_name[name] for name in self.flow.segment_of)
        self.read_after_update = frozenset(value for op in recomputed for value in op.inputs)
        self.read_after_update |= saved_before_update(self.graph)
        self.read_after_update |= returned_before_update(self.graph)
        early = self._start_ahead()
        self.buckets.enter()
        for op in self.graph.ops:
            if op in early:
                continue
            if self._waits_for_bias(op):
                self.fused[op.output] = op
            else:
                self._operator(op)
        routes = self.flow.output_routes
        outputs = [
            self._converted(leaf, routes[leaf]) if isinstance(leaf, Value) else repr(leaf)
            for leaf in self.graph.outputs
        ]
        updates = [
            self._converted(value, self.flow.update_routes[before])
            for before, value in self.graph.updates
        ]
        returns = f"[{', '.join(outputs)}], [{', '.join(updates)}]"
        lines = self.source.nested([*outputs, *updates], self._checkpoint())
        body = write_body(lines, [*outputs, *updates])
        text = "\n".join([HEADER, *body, f"    return {returns}\n"])
        return Program(
            text,
            self.source.compile(text, "program"),
            self.flow,
            self.graph.parameters,
            self.buckets.bound,
            self.unsharded,
            tuple(self.casts),
            self.buckets.regather,
            partial(compile_regions, self.source, lines, (HEADER, returns)),
        )

    def _checkpoint(self) -> Callable[..., Any]:
        """Function that runs recomputed segments. On one device, random operators draw from torch's
        generator, whose state it has to restore; on several, each draw has its own seed."""
        if self.devices.is_distributed:
            return recompute_segment
        recomputed = (self.graph.by_name[name] for name in self.flow.segment_of)
        return recompute_drawing_segment if any(map(is_random, recomputed)) else recompute_segment

    # Values

    def _variable(self, value: Value) -> str:
        """Variable that holds `value` in its initial layout."""
        if value not in self.variables:
            name = self.variables[value] = self.source.name(value.name)
            is_cast = value.dtype != value.stored_dtype
            cast = f".to({value.dtype})" if is_cast else ""
            if value in self.flow.update_routes and value in self.read_after_update:
                # The old value is read after the update: by the backward pass, or by the caller.
                cast = ".clone()"
            if value.kind is Kind.PARAMETER and self.unsharded and is_cast:
                self.casts.append(value)
                self.source.add([name], f"parameters[{cast_name(value)!r}]", [])
            elif value.kind is Kind.PARAMETER:
                self.source.add([name], f"parameters[{value.name!r}]{cast}", [])
            elif value.kind is Kind.BUFFER:
                self.source.add([name], f"buffers[{value.name!r}]{cast}", [])
            elif value.kind is Kind.INPUT:
                number = next(i for i, leaf in enumerate(self.graph.inputs) if leaf is value)
                self.source.add([name], f"inputs[{number}]{cast}", [])
            elif value.kind is Kind.CONSTANT:
                tensor = self.graph.constants[value].to(self.devices.device)
                constant = self.source.refer(f"constant_{len(self.source.scope)}", tensor)
                self.source.add([name], constant, [])
        return self.variables[value]

    def _converted(self, value: Value, route: Sequence[Transfer]) -> str:
        """Variable that holds `value` after the transfers of `route`."""
        name = self.buckets.member(value, route)
        if name is None:
            name = self._variable(value)
        else:
            route = route[num_bucketed_steps(route) :]
        return self.transfers.convert(name, route)

    def _pending_loss(self) -> Transfer | None:
        """The all-reduce of the loss that is not finished in the program, if there is one."""
        loss = self.graph.loss
        if not self.pending_loss or loss is None or self.graph.consumers[loss]:
            return None
        route = self.flow.output_routes[loss]
        return route[-1] if route and route[-1].step.kind == "all_reduce" else None

    def _weight(self, op: Op) -> str:
        return self._converted(op.inputs[1], self.flow.routes[op.name, 1])

    # Operators

    def _start_ahead(self) -> set[Op]:
        """Emits the first halves of two-phase kernels at the top of the program, where they depend
        on inputs only, so that no device waits for others there. Returns the operators emitted."""
        early: set[Op] = set()
        for op in self.graph.ops:
            kernel = self.kernels.of(op)
            if not isinstance(kernel, TwoPhaseKernel) or self._segment(op) is not None:
                continue
            makers = ops_from_inputs(self.graph, [op.inputs[i] for i in kernel.reads])
            if makers is None or any(self._segment(maker) is not None for maker in makers):
                continue
            for maker in makers:
                if maker not in early:
                    self._operator(maker)
            early.update(makers)
            routes = [(op.inputs[i], self.flow.routes[op.name, i]) for i in kernel.reads]
            reads = [self._converted(value, route) for value, route in routes]
            name = self.started[op] = self.source.name(f"{op.name}_ahead")
            start = self.source.refer(f"start_{op.short_name}", kernel.start)
            self.source.add([name], f"{start}({', '.join(reads)})", reads, f"{op.name}: ahead")
        return early

    def _operator(self, op: Op) -> None:
        input_variables: dict[int, str] = {}
        variables = []
        for index, value in enumerate(op.inputs):
            if value in self.fused:
                self._emit_inputs(self.fused[value])
                continue
            route = self.flow.routes[op.name, index]
            variables.append(self._converted(value, route))
            input_variables[index] = variables[-1]
        if op.inputs and op.inputs[0] in self.fused:
            self._with_bias(self.fused.pop(op.inputs[0]), op, input_variables[1])
            return
        rule = rule_of(op)
        args, kwargs = self._arguments(op, rule)
        counter = iter(range(len(op.inputs)))

        def variable(_: Value) -> str:
            return input_variables[next(counter)]

        function = self._function(op, rule)
        if op in self.transfers.delayed:
            function, input_variables[1] = (
                self.source.refer("linear", delayed_linear),
                self.transfers.delayed[op],
            )
            variables[1] = input_variables[1]
        texts = [expression(a, variable) for a in args]
        texts += [f"{key}={expression(a, variable)}" for key, a in kwargs.items()]
        if self.devices.is_distributed and is_random(op):
            texts.insert(0, "seed")
        if op in self.started:
            texts.insert(0, self.started[op])
            variables.append(self.started[op])
        names = [self.source.name(value.name) for value in op.outputs]
        self.variables.update(zip(op.outputs, names, strict=True))
        call, comment = f"{function}({', '.join(texts)})", self._comment(op, rule)
        segment, label = self._segment(op), self._label(op)
        self.source.add(names, call, variables, comment, returns_many(op), segment, label)
        for value, name in zip(op.outputs, names, strict=True):
            self.transfers.start(value, name)

    def _label(self, op: Op) -> str:
        return op.name if self.devices.named_ranges else ""

    def _segment(self, op: Op) -> str | None:
        segment = self.flow.segment_of.get(op.name)
        return segment.name if segment is not None else None

    def _arguments(self, op: Op, rule: ShardingRule | None) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of the operator, with output sizes replaced by local sizes."""
        args, kwargs = list(op.args), dict(op.kwargs)
        if rule is not None and rule.sizes is not None:
            args[rule.sizes] = list(
                self.flow.initial_layouts[op.output].shard_shape(op.output.shape)
            )
        if op.takes_device:
            kwargs["device"] = self.devices.device
        return args, kwargs

    def _function(self, op: Op, rule: ShardingRule | None) -> str:
        """Name of the function that computes `op` on local tensors."""
        function = self.kernels.of(op)
        if op in self.started:
            assert isinstance(function, TwoPhaseKernel)
            function = function.finish
        if self.devices.is_distributed and is_random(op):
            layout = self.flow.initial_layouts[op.output]
            sharded = (axis for dim in layout.axes for axis in dim)
            axes = tuple(dict.fromkeys((*sharded, *sorted(layout.partial))))
            function = Seeded(function, stream_number(op.name), self.devices.index(axes))
            return self.source.refer(f"seeded_{op.short_name}", function)
        if function is op.target and isinstance(function, OpOverload):
            if leaves_out_results(op):
                name = f"results_of_{op.short_name}"
                return self.source.refer(name, partial(made_results, function))
            if function.namespace == "aten":
                return str(function)
            if function.namespace == "shardwright":
                return f"torch.ops.{function}"
            layouts = ((v, self.flow.initial_layouts[v]) for v in op.outputs)
            output_specs = tuple((layout.shard_shape(v.shape), v.dtype) for v, layout in layouts)
            return self.source.refer(
                f"own_{op.short_name}", CheckedCustomOp(function, output_specs)
            )
        return self.source.refer(
            f"local_{op.short_name}" if function is not op.target else op.short_name, function
        )

    def _comment(self, op: Op, rule: ShardingRule | None) -> str:
        if rule is None:
            return f"{op.name}: no sharding rule, computed in full on every device"
        named = self.devices.matrix.named
        cuts = [
            f"{factor} over {named(axes)}"
            for factor, axes in self.cuts.get(op.name, {}).items()
            if axes
        ]
        return f"{op.name}: {', '.join(cuts)}" if cuts else op.name

    # Capture splits biases from linear layers, as a bias must be added to a partial sum only once.
    # Where no redistribution lies between, the two are merged again into one kernel.

    def _waits_for_bias(self, op: Op) -> bool:
        if op.target is not aten.linear.default or len(op.inputs) != 2:
            return False
        uses = self.graph.consumers[op.output]
        if len(uses) != 1 or op.output in self.graph.output_values:
            return False
        add, index = uses[0]
        return (
            add.target is aten.add.Tensor
            and index == 0
            and not add.kwargs
            and len(add.inputs) == 2
            and add.inputs[1].shape == op.output.shape[-1:]
            and add.inputs[1].dtype == op.output.dtype
            and not self.flow.initial_layouts[op.output].partial
            and not self.flow.routes[add.name, 0]
            and self._segment(op) == self._segment(add)
        )

    def _emit_inputs(self, layer: Op) -> list[str]:
        """Emits the inputs of a linear layer before those of its bias; returns their variables."""
        return [
            self._converted(value, self.flow.routes[layer.name, index])
            for index, value in enumerate(layer.inputs)
        ]

    def _with_bias(self, layer: Op, add: Op, bias: str) -> None:
        reads, function = self._emit_inputs(layer), "aten.linear.default"
        if layer in self.transfers.delayed:
            function, reads[1] = (
                self.source.refer("linear", delayed_linear),
                self.transfers.delayed[layer],
            )
        name = self.variables[add.output] = self.source.name(layer.output.name)
        comment = f"{self._comment(layer, rule_of(layer))}; with {add.name}"
        reads.append(bias)
        call, segment = f"{function}({', '.join(reads)})", self._segment(layer)
        label = self._label(layer)
        self.source.add([name], call, reads, comment, segment=segment, label=label)
        self.transfers.start(add.output, name)

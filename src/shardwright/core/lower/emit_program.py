"""Write the program of one rank as Python source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from shardwright.core.graph.graph import Graph, Op, Origin, Value, ops_from_inputs
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.graph.saved_tensors import returned_before_update, saved_before_update
from shardwright.core.lower.emit import NAMED_RANGE, Source, expression, write_body
from shardwright.core.lower.emit_buckets import BucketLines, cast_key
from shardwright.core.lower.emit_transfers import TransferLines
from shardwright.core.lower.kernels import (
    Kernels,
    drop_nones,
    returns_many,
    returns_nones,
)
from shardwright.core.lower.program import Program
from shardwright.core.lower.regions import compile_regions
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.parameter_buckets import num_bucketed_steps
from shardwright.core.partition.transfer import Transfer
from shardwright.core.rules import is_random, rule_of
from shardwright.core.rules.rule import Cuts, ShardingRule, TwoPhaseKernel
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.fake_implementations import CheckedCustomOp
from shardwright.core.runtime.overlap import delayed_linear
from shardwright.core.runtime.random import (
    Seeded,
    recompute_drawing_segment,
    recompute_segment,
    stream_number,
)
from shardwright.core.torch_internals.operators import OpOverload

aten = torch.ops.aten


HEADER = "def program(parameters, buffers, inputs, seed):"


def lower(
    chunk: Chunk,
    devices: Devices,
    unsharded: bool = False,
    pending_loss: bool = False,
    python_state: frozenset[str] = frozenset(),
) -> Program:
    """Lower `chunk` to the program of this rank.

    Args:
        chunk: a partitioned graph, all or a part of the model.
        devices: this rank's view of the devices.
        unsharded: whether the program reads parameters that `UnshardedParameters` caches for the
            micro-batches of a step, instead of gathering them itself.
        pending_loss: whether the all-reduce of the loss is started but not finished, as the
            backward pass does not need it; call `collectives.wait` before reading the loss.
        python_state: names of the constants that hold tensors of the model's Python state. The
            program reads them from its `buffers`, because each call may change them.
    """
    return _ProgramEmitter(chunk, devices, unsharded, pending_loss, python_state).program()


@dataclass
class _ProgramEmitter:
    chunk: Chunk
    devices: Devices
    unsharded: bool
    pending_loss: bool
    python_state: frozenset[str]
    buckets: BucketLines = field(init=False)
    source: Source = field(default_factory=Source)
    variables: dict[Value, str] = field(default_factory=dict)
    transfers: TransferLines = field(init=False)
    deferred_linears: dict[Value, Op] = field(default_factory=dict)
    kernels: Kernels = field(init=False)
    started_kernels: dict[Op, str] = field(default_factory=dict)
    casts: list[Value] = field(default_factory=list)
    read_after_update: frozenset[Value] = frozenset()

    @property
    def graph(self) -> Graph:
        return self.chunk.graph

    @property
    def cuts(self) -> Mapping[str, Cuts]:
        return self.chunk.decisions.cuts

    @property
    def communication(self) -> Communication:
        return self.chunk.communication

    def program(self) -> Program:
        # Reserved, so that no variable shadows an argument of the program.
        for name in ("parameters", "buffers", "inputs", "seed", "device"):
            self.source.name(name)
        local = (op for op in self.graph.ops if isinstance(op.target, LocalCall))
        self.buckets = BucketLines(
            self.communication,
            self.devices,
            self.unsharded,
            self.source,
            frozenset(value for op in local for value in op.inputs),
        )
        self.kernels = Kernels(self.devices, self.cuts, self.communication)
        self.transfers = TransferLines(
            self.communication,
            self.devices,
            self.source,
            self.chunk.overlaps,
            self._find_pending_loss_transfer(),
            self._emit_weight_redistribution,
        )
        if self.devices.named_ranges:
            self.source.refer(NAMED_RANGE, record_function)
        recomputed = (self.graph.by_name[name] for name in self.communication.segment_of)
        self.read_after_update = frozenset(value for op in recomputed for value in op.inputs)
        # Buffers are updated in place after the program has run. An old value that is read later
        # has to be cloned: by a recomputed operator, from saved tensors, or as an output.
        self.read_after_update |= saved_before_update(self.graph)
        self.read_after_update |= returned_before_update(self.graph)
        # Before the first gather, as the all-reduces of early starts are small and need inputs
        # only.
        emitted_early = self._emit_early_starts()
        self.buckets.enter()
        for op in self.graph.ops:
            if op in emitted_early:
                continue
            if self._is_fused_with_bias(op):
                # Emitted by `_emit_biased_layer`, in the place of the addition of its bias.
                self.deferred_linears[op.output] = op
            else:
                self._emit_operator(op)
        routes = self.communication.output_routes
        outputs = [
            # Other leaves, such as None or a number, are constants of the captured graph.
            self._emit_route(leaf, routes[leaf]) if isinstance(leaf, Value) else repr(leaf)
            for leaf in self.graph.outputs
        ]
        updates = [
            self._emit_route(value, self.communication.update_routes[before])
            for before, value in self.graph.updates
        ]
        returns = f"[{', '.join(outputs)}], [{', '.join(updates)}]"
        lines = self.source.nest_segments([*outputs, *updates], self._choose_recompute_function())
        body = write_body(lines, [*outputs, *updates])
        source = "\n".join([HEADER, *body, f"    return {returns}\n"])
        return Program(
            source,
            self.source.compile(source, "program"),
            self.communication,
            self.graph.parameters,
            self.buckets.bound,
            self.unsharded,
            tuple(self.casts),
            self.buckets.regather,
            partial(compile_regions, self.source, lines, (HEADER, returns)),
        )

    def _choose_recompute_function(self) -> Callable[..., Any]:
        """Return the function that runs recomputed segments.

        On one device, random operators draw from PyTorch's generator, whose state the function must
        restore if a recomputed operator is random; on several devices each draw has its own seed.
        """
        if self.devices.is_distributed:
            return recompute_segment
        recomputed = (self.graph.by_name[name] for name in self.communication.segment_of)
        return recompute_drawing_segment if any(map(is_random, recomputed)) else recompute_segment

    # Values

    def _emit_argument_read(self, value: Value) -> str:
        """Return the variable of `value` in its initial layout; the first call emits the read of an
        argument of the program."""
        if value not in self.variables:
            name = self.variables[value] = self.source.name(value.name)
            is_cast = value.dtype != value.stored_dtype
            cast = f".to({value.dtype})" if is_cast else ""
            if value in self.communication.update_routes and value in self.read_after_update:
                # The backward pass or the caller reads the old value after the update. No cast is
                # needed too, as capture refuses to change a parameter that is cast.
                cast = ".clone()"
            if value.origin is Origin.PARAMETER and self.unsharded and is_cast:
                # Cast once per step, not in each micro-batch.
                self.casts.append(value)
                self.source.add([name], f"parameters[{cast_key(value)!r}]", [])
            elif value.origin is Origin.PARAMETER:
                self.source.add([name], f"parameters[{value.name!r}]{cast}", [])
            elif value.origin is Origin.BUFFER or value.name in self.python_state:
                self.source.add([name], f"buffers[{value.name!r}]{cast}", [])
            elif value.origin is Origin.INPUT:
                index = next(i for i, leaf in enumerate(self.graph.inputs) if leaf is value)
                self.source.add([name], f"inputs[{index}]{cast}", [])
            elif value.origin is Origin.CONSTANT:
                # Moved once, at lowering, instead of in every call.
                tensor = self.graph.constants[value].to(self.devices.device)
                # The scope only grows, so its length is a number that no other constant has.
                constant = self.source.refer(f"constant_{len(self.source.scope)}", tensor)
                self.source.add([name], constant, [])
        return self.variables[value]

    def _emit_route(self, value: Value, route: Sequence[Transfer]) -> str:
        """Emit the redistribution of `value` by `route`, and return the variable of the result."""
        name = self.buckets.member(value, route)
        if name is None:
            name = self._emit_argument_read(value)
        else:
            # The bucket performs the leading steps of the route.
            route = route[num_bucketed_steps(route) :]
        return self.transfers.convert(name, route)

    def _find_pending_loss_transfer(self) -> Transfer | None:
        """Return the all-reduce of the loss if the program starts it without finishing it; else
        None."""
        loss = self.graph.loss
        # An operator that reads the loss would wait for the all-reduce anyway.
        if not self.pending_loss or loss is None or self.graph.consumers[loss]:
            return None
        route = self.communication.output_routes[loss]
        return route[-1] if route and route[-1].step.operation == "all_reduce" else None

    def _emit_weight_redistribution(self, op: Op) -> str:
        return self._emit_route(op.inputs[1], self.communication.routes[op.name, 1])

    # Operators

    def _emit_early_starts(self) -> set[Op]:
        """Emit, at the top of the program, the start of collectives that depend on inputs only.

        An example is the sum of the number of valid targets. The collectives then overlap
        computation.

        Returns:
            The operators that compute the communicated tensors; they are emitted first.
        """
        emitted_early: set[Op] = set()
        for op in self.graph.ops:
            kernel = self.kernels.of(op)
            # A recomputed segment is one function, whose lines cannot be moved to the top.
            if not isinstance(kernel, TwoPhaseKernel) or self._get_segment_name(op) is not None:
                continue
            producers = ops_from_inputs(self.graph, [op.inputs[i] for i in kernel.reads])
            if producers is None or any(
                self._get_segment_name(producer) is not None for producer in producers
            ):
                continue
            for producer in producers:
                if producer not in emitted_early:
                    self._emit_operator(producer)
            emitted_early.update(producers)
            routes = [(op.inputs[i], self.communication.routes[op.name, i]) for i in kernel.reads]
            reads = [self._emit_route(value, route) for value, route in routes]
            name = self.started_kernels[op] = self.source.name(f"{op.name}_ahead")
            start = self.source.refer(f"start_{op.short_name}", kernel.start)
            self.source.add([name], f"{start}({', '.join(reads)})", reads, f"{op.name}: ahead")
        return emitted_early

    def _emit_operator(self, op: Op) -> None:
        input_variables: dict[int, str] = {}
        variables = []
        for index, value in enumerate(op.inputs):
            # Inputs of the linear layer come first, as in the graph: overlap depends on the order.
            if value in self.deferred_linears:
                self._emit_linear_inputs(self.deferred_linears[value])
                continue
            route = self.communication.routes[op.name, index]
            variables.append(self._emit_route(value, route))
            input_variables[index] = variables[-1]
        if op.inputs and op.inputs[0] in self.deferred_linears:
            self._emit_biased_layer(self.deferred_linears.pop(op.inputs[0]), op, input_variables[1])
            return
        rule = rule_of(op)
        args, kwargs = self._make_local_arguments(op, rule)
        # `expression` visits values in the order of `op.inputs`.
        counter = iter(range(len(op.inputs)))

        def variable(_: Value) -> str:
            return input_variables[next(counter)]

        function = self._name_local_function(op, rule)
        # The layer's weight gradient overlaps a collective of the backward pass
        # (`runtime/overlap.py`).
        if op in self.transfers.delayed:
            function, input_variables[1] = (
                self.source.refer("linear", delayed_linear),
                self.transfers.delayed[op],
            )
            variables[1] = input_variables[1]
        arguments = [expression(a, variable) for a in args]
        arguments += [f"{key}={expression(a, variable)}" for key, a in kwargs.items()]
        if self.devices.is_distributed and is_random(op):
            arguments.insert(0, "seed")
        if op in self.started_kernels:
            arguments.insert(0, self.started_kernels[op])
            variables.append(self.started_kernels[op])
        names = [self.source.name(value.name) for value in op.outputs]
        self.variables.update(zip(op.outputs, names, strict=True))
        call, comment = (
            f"{function}({', '.join(arguments)})",
            self._format_operator_comment(op, rule),
        )
        segment, label = self._get_segment_name(op), self._get_range_label(op)
        self.source.add(names, call, variables, comment, returns_many(op), segment, label)
        for value, name in zip(op.outputs, names, strict=True):
            # Right after the producer, so that all operators up to the first consumer overlap.
            self.transfers.start(value, name)

    def _get_range_label(self, op: Op) -> str:
        return op.name if self.devices.named_ranges else ""

    def _get_segment_name(self, op: Op) -> str | None:
        segment = self.communication.segment_of.get(op.name)
        return segment.name if segment is not None else None

    def _make_local_arguments(
        self, op: Op, rule: ShardingRule | None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of `op`, with local output sizes and the device of this rank."""
        args, kwargs = list(op.args), dict(op.kwargs)
        if rule is not None and rule.sizes is not None:
            # `view(b, s, d)` of a shard has local sizes.
            args[rule.sizes] = list(
                self.communication.initial_layouts[op.output].shard_shape(op.output.shape)
            )
        # The call names the device on which the model was captured.
        if op.takes_device:
            kwargs["device"] = self.devices.device
        return args, kwargs

    def _name_local_function(self, op: Op, rule: ShardingRule | None) -> str:
        """Return the name, in generated source, of the function that computes `op` on local
        tensors."""
        function = self.kernels.of(op)
        # `start` is at the top of the program, in `_emit_early_starts`.
        if op in self.started_kernels:
            assert isinstance(function, TwoPhaseKernel)
            function = function.finish
        if self.devices.is_distributed and is_random(op):
            layout = self.communication.initial_layouts[op.output]
            # Ranks with different shards, or with different terms of a sum, draw different numbers;
            # replicas draw equal numbers.
            sharded = (axis for dim in layout.axes for axis in dim)
            axes = tuple(dict.fromkeys((*sharded, *sorted(layout.partial))))
            function = Seeded(function, stream_number(op.name), self.devices.index(axes))
            return self.source.refer(f"seeded_{op.short_name}", function)
        if function is op.target and isinstance(function, OpOverload):
            if returns_nones(op):
                name = f"results_of_{op.short_name}"
                return self.source.refer(name, partial(drop_nones, function))
            # `aten` is in the scope of the source, so that the text names the operator itself.
            if function.namespace == "aten":
                return str(function)
            if function.namespace == "shardwright":
                return f"torch.ops.{function}"
            # A custom operator of the user, whose fake implementation may be wrong.
            layouts = ((v, self.communication.initial_layouts[v]) for v in op.outputs)
            output_specs = tuple((layout.shard_shape(v.shape), v.dtype) for v, layout in layouts)
            return self.source.refer(
                f"own_{op.short_name}", CheckedCustomOp(function, output_specs)
            )
        return self.source.refer(
            f"local_{op.short_name}" if function is not op.target else op.short_name, function
        )

    def _format_operator_comment(self, op: Op, rule: ShardingRule | None) -> str:
        if rule is None:
            return f"{op.name}: no sharding rule, computed in full on every device"
        named = self.devices.matrix.named
        cuts = [
            f"{factor} over {named(axes)}"
            for factor, axes in self.cuts.get(op.name, {}).items()
            if axes
        ]
        return f"{op.name}: {', '.join(cuts)}" if cuts else op.name

    # Capture separates biases from linear layers, as a bias must be added to a partial sum only
    # once. Without a redistribution between them, both are fused into one kernel again.

    def _is_fused_with_bias(self, op: Op) -> bool:
        if op.target is not aten.linear.default or len(op.inputs) != 2:
            return False
        consumers = self.graph.consumers[op.output]
        # Another reader needs the product without the bias.
        results = {*self.graph.output_values, *(value for _, value in self.graph.updates)}
        if len(consumers) != 1 or op.output in results:
            return False
        add, index = consumers[0]
        return (
            add.target is aten.add.Tensor
            and index == 0
            # `alpha` would scale the bias.
            and not add.kwargs
            and len(add.inputs) == 2
            # `F.linear` takes a vector as bias. A partial sum must be reduced before the bias is
            # added, or each of its terms would add it.
            and add.inputs[1].shape == op.output.shape[-1:]
            and add.inputs[1].dtype == op.output.dtype
            and not self.communication.initial_layouts[op.output].partial
            and not self.communication.routes[add.name, 0]
            and self._get_segment_name(op) == self._get_segment_name(add)
        )

    def _emit_linear_inputs(self, layer: Op) -> list[str]:
        """Emit the inputs of a linear layer, and return their variables."""
        return [
            self._emit_route(value, self.communication.routes[layer.name, index])
            for index, value in enumerate(layer.inputs)
        ]

    def _emit_biased_layer(self, layer: Op, add: Op, bias: str) -> None:
        reads, function = self._emit_linear_inputs(layer), "aten.linear.default"
        if layer in self.transfers.delayed:
            function, reads[1] = (
                self.source.refer("linear", delayed_linear),
                self.transfers.delayed[layer],
            )
        name = self.variables[add.output] = self.source.name(layer.output.name)
        comment = f"{self._format_operator_comment(layer, rule_of(layer))}; with {add.name}"
        reads.append(bias)
        call, segment = f"{function}({', '.join(reads)})", self._get_segment_name(layer)
        label = self._get_range_label(layer)
        self.source.add([name], call, reads, comment, segment=segment, label=label)
        self.transfers.start(add.output, name)

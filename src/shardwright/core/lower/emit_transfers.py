"""Emit the lines of a program that redistribute values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.core.graph.graph import Op, Value
from shardwright.core.lower.emit import Source
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.overlap import Overlap
from shardwright.core.partition.transfer import Transfer
from shardwright.core.runtime.collectives import BoundCollective, bind, start_all_reduce
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.named_ranges import wrap_step
from shardwright.core.runtime.overlap import DelayGradient, FinishCollective, StartCollective


@dataclass
class TransferLines:
    """Emitter of transfers, as one line each, or as a start and a finish line around computation.

    A *transfer* is a redistribution step of a value.

    Args:
        communication: the communication of the program.
        devices: this rank's view of the devices.
        source: the source text to which lines are added.
        overlaps: transfers with separate start and finish lines.
        pending: transfer of the loss that is started but not finished, or None.
        weight_of: returns the variable of a linear layer's weight.
        delayed: variables of weights whose gradients are delayed, by linear layer.
    """

    communication: Communication
    devices: Devices
    source: Source
    overlaps: Mapping[Transfer, Overlap]
    pending: Transfer | None
    weight_of: Callable[[Op], str]
    delayed: dict[Op, str] = field(default_factory=dict)
    _started_variables: dict[Transfer, str] = field(default_factory=dict)
    _result_variables: dict[Transfer, str] = field(default_factory=dict)
    _bound_functions: dict[Any, Any] = field(default_factory=dict)
    _starts_after: dict[Value, list[Transfer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for transfer, overlap in self.overlaps.items():
            # A transfer that overlaps no operators starts where it finishes, in `_emit_transfer`.
            if overlap.overlapping_ops and transfer is not self.pending:
                self._starts_after.setdefault(transfer.value, []).append(transfer)

    def start(self, value: Value, name: str) -> None:
        """Emit the starts of overlapped transfers of `value`, computed in variable `name`."""
        for transfer in self._starts_after.get(value, ()):
            self._emit_transfer_start(transfer, name)

    def convert(self, name: str, route: Sequence[Transfer]) -> str:
        """Emit the transfers of `route` from the variable `name`, and return the variable of the
        result."""
        for transfer in route:
            # Consumers of a value in the same layout share its transfers: `q`, `k` and `v` read the
            # result of one `vary`, and their gradients are all-reduced once.
            if transfer not in self._result_variables:
                self._result_variables[transfer] = self._emit_transfer(transfer, name)
            name = self._result_variables[transfer]
        return name

    def _emit_transfer(self, transfer: Transfer, variable: str) -> str:
        if transfer not in self.overlaps or transfer is self.pending:
            # Only started: the backward pass does not read the loss, and whoever reads it waits
            # (`pending_loss` of `lower`).
            prefix = "start" if transfer is self.pending else ""
            return self._emit_collective_call(
                transfer, prefix, self._bind_transfer(transfer), variable
            )
        # Nothing is computed between its producer and this line, so that it starts here.
        if transfer not in self._started_variables:
            self._emit_transfer_start(transfer, variable)
        # Emitted between start and finish, so that the backward pass, in reverse order, computes
        # weight gradients while it communicates the gradient of the input.
        for op in self.overlaps[transfer].delayed_linears:
            self._emit_gradient_delay(op, transfer)
        pending = self._started_variables[transfer]
        return self._emit_collective_call(
            transfer, "finish", self._bind_start_or_finish(transfer, FinishCollective), pending
        )

    def _emit_transfer_start(self, transfer: Transfer, variable: str) -> None:
        function = self._bind_start_or_finish(transfer, StartCollective)
        self._started_variables[transfer] = self._emit_collective_call(
            transfer, "start", function, variable
        )

    def _emit_gradient_delay(self, op: Op, transfer: Transfer) -> None:
        """Emit a line in whose backward pass the delayed weight gradient of `op` is computed."""
        weight = self.weight_of(op)
        shape = self.communication.initial_layouts[op.output].shard_shape(op.output.shape)
        x_shape = self.communication.input_layouts[op.name][0].shard_shape(op.inputs[0].shape)
        # Shared by layers of equal shapes, so that repeated blocks have equal text.
        function = self._bound_functions.setdefault((x_shape, shape), DelayGradient(x_shape, shape))
        call = f"{self.source.refer('delay_gradient', function)}({weight})"
        name = self.delayed[op] = self.source.name(weight)
        self.source.add([name], call, [weight], segment=transfer.segment)

    def _emit_collective_call(
        self, transfer: Transfer, prefix: str, function: Any, variable: str
    ) -> str:
        step = transfer.step
        axes = self.devices.matrix.named(step.axes, "_")
        dims = "_to_".join(f"dim{d}" for d in (step.dim, step.to_dim) if d is not None)
        name_hint = "_".join(word for word in (prefix, step.operation, dims, axes) if word)
        # Two all-gathers over the same axes may differ in their gradients.
        if step.operation == "all_gather" and step.backward == "reduce_scatter":
            name_hint += "_varying"
        redistribution = self.source.refer(name_hint, function)
        name = self.source.name(transfer.value.name)
        call = f"{redistribution}({variable})"
        self.source.add([name], call, [variable], segment=transfer.segment)
        return name

    def _bind_start_or_finish(
        self, transfer: Transfer, collective_half: type[StartCollective] | type[FinishCollective]
    ) -> Any:
        function = self._bind_transfer(transfer)
        # By `id`: `_bound_functions` keeps all functions alive, so that no id is used twice.
        return self._bound_functions.setdefault(
            (collective_half, id(function)), collective_half(function)
        )

    def _bind_transfer(self, transfer: Transfer) -> BoundCollective:
        """Return the function that executes a transfer; transfers with equal steps share one
        function."""
        step, pending = transfer.step, transfer is self.pending
        call = step.operation, step.axes, step.dim, step.to_dim, step.backward
        key: tuple[Any, ...] = (pending, *call)
        # A permutation depends on both layouts, other steps only on their dimensions.
        if step.spec.pattern == "point_to_point":
            key = (*key, step.source.axes, step.target.axes)
        if key not in self._bound_functions:
            binding = start_all_reduce if pending else bind
            bound = binding(step, self.devices)
            if self.devices.named_ranges:
                # The gradient of an all-reduced loss is replicated, and needs no collective.
                layout, backward = self.devices.matrix, None if pending else step.backward
                bound = wrap_step(bound, step.forward, backward, step.axes, layout)
            self._bound_functions[key] = bound
        function: BoundCollective = self._bound_functions[key]
        return function

"""Emits the lines of a program that redistribute values."""

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
from shardwright.core.runtime.named_ranges import around_both
from shardwright.core.runtime.overlap import DelayGradient, FinishCollective, StartCollective


@dataclass
class TransferLines:
    """Emits one line per transfer, or start and finish lines if it overlaps computation.

    Args:
        overlaps: transfers with separate start and finish.
        pending: transfer of the loss that is started but not finished, if any.
        weight: returns the variable of a linear layer's weight.
        delayed: variables of weights whose gradients are delayed, by linear layer.
    """

    flow: Communication
    devices: Devices
    source: Source
    overlaps: Mapping[Transfer, Overlap]
    pending: Transfer | None
    weight: Callable[[Op], str]
    delayed: dict[Op, str] = field(default_factory=dict)
    _started: dict[Transfer, str] = field(default_factory=dict)
    _converted: dict[Transfer, str] = field(default_factory=dict)
    _bound: dict[Any, Any] = field(default_factory=dict)
    _early: dict[Value, list[Transfer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for transfer, overlap in self.overlaps.items():
            if overlap.overlapping_ops and transfer is not self.pending:
                self._early.setdefault(transfer.value, []).append(transfer)

    def start(self, value: Value, name: str) -> None:
        """Emits the start of overlapped transfers of a value that was just computed."""
        for transfer in self._early.get(value, ()):
            self._start(transfer, name)

    def convert(self, name: str, route: Sequence[Transfer]) -> str:
        """Emits the transfers of a route from the variable `name`; returns the last variable."""
        for transfer in route:
            if transfer not in self._converted:
                self._converted[transfer] = self._convert(transfer, name)
            name = self._converted[transfer]
        return name

    def _convert(self, transfer: Transfer, before: str) -> str:
        if transfer not in self.overlaps or transfer is self.pending:
            prefix = "start" if transfer is self.pending else ""
            return self._line(transfer, prefix, self._function(transfer), before)
        if transfer not in self._started:
            self._start(transfer, before)
        # Between start and finish, so that in the backward pass, in reverse order, weight gradients
        # are computed while the gradient of the input is communicated.
        for op in self.overlaps[transfer].delayed_linears:
            self._delay(op, transfer)
        pending = self._started[transfer]
        return self._line(transfer, "finish", self._half(transfer, FinishCollective), pending)

    def _start(self, transfer: Transfer, before: str) -> None:
        function = self._half(transfer, StartCollective)
        self._started[transfer] = self._line(transfer, "start", function, before)

    def _delay(self, op: Op, transfer: Transfer) -> None:
        """Emits the point at which the backward pass computes a linear layer's weight gradient."""
        weight = self.weight(op)
        shape = self.flow.initial_layouts[op.output].shard_shape(op.output.shape)
        x_shape = self.flow.input_layouts[op.name][0].shard_shape(op.inputs[0].shape)
        function = self._bound.setdefault((x_shape, shape), DelayGradient(x_shape, shape))
        call = f"{self.source.refer('delay_gradient', function)}({weight})"
        name = self.delayed[op] = self.source.name(weight)
        self.source.add([name], call, [weight], segment=transfer.segment)

    def _line(self, transfer: Transfer, prefix: str, function: Any, before: str) -> str:
        step = transfer.step
        over = self.devices.matrix.named(step.axes, "_")
        dims = "_to_".join(f"dim{d}" for d in (step.dim, step.to_dim) if d is not None)
        wanted = "_".join(part for part in (prefix, step.kind, dims, over) if part)
        if step.kind == "all_gather" and step.backward == "reduce_scatter":
            wanted += "_varying"
        redistribution = self.source.refer(wanted, function)
        name = self.source.name(transfer.value.name)
        call = f"{redistribution}({before})"
        self.source.add([name], call, [before], segment=transfer.segment)
        return name

    def _half(
        self, transfer: Transfer, half: type[StartCollective] | type[FinishCollective]
    ) -> Any:
        function = self._function(transfer)
        return self._bound.setdefault((half, id(function)), half(function))

    def _function(self, transfer: Transfer) -> BoundCollective:
        """Function that executes a transfer, shared by transfers with equal steps."""
        step, pending = transfer.step, transfer is self.pending
        key: tuple[Any, ...] = (pending, step.kind, step.axes, step.dim, step.to_dim, step.backward)
        # A permutation depends on both layouts, other steps only on their dimensions.
        if step.spec.pattern == "point_to_point":
            key = (*key, step.source.axes, step.target.axes)
        if key not in self._bound:
            binding = start_all_reduce if pending else bind
            bound = binding(step, self.devices)
            if self.devices.named_ranges:
                layout, back = self.devices.matrix, None if pending else step.backward
                bound = around_both(bound, step.forward, back, step.axes, layout)
            self._bound[key] = bound
        function: BoundCollective = self._bound[key]
        return function

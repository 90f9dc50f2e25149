"""Rows of a plan: plain data about the sharding and communication of each operator."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.core.cost.time_parts import TimePart
from shardwright.core.layout.axes import Shape
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout

Strategy = tuple[tuple[int, ...], ...]
"""Number of shards of each dimension of each input of an operator."""


@dataclass(frozen=True)
class RedistributionRow:
    """The redistribution of a value from its producer's layout to the layout a consumer reads.

    Args:
        value: name of the value; empty for collectives inside an operator.
        steps: one description per collective, in order.
        forward_bytes, backward_bytes: communication volume of one device in each pass. The bytes of
            steps that are shared with an earlier consumer are in that consumer's row only.
        shared: whether some of the steps are shared with an earlier consumer of the value.
        input: index of the redistributed input of the operator; None for collectives inside an
            operator, model outputs and updated buffers.
    """

    value: str
    steps: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    shared: bool
    input: int | None = None

    @property
    def steps_text(self) -> str:
        """Descriptions of the collectives, joined by ", then "."""
        return ", then ".join(self.steps)


@dataclass(frozen=True)
class CrossingRow:
    """The point-to-point communication between two consecutive chunks on different stages.

    Args:
        stage, to_stage: indices of the sending and the receiving stage.
        values: names of the values sent.
        forward_bytes, backward_bytes: communication volume of one device per micro-batch, for the
            values in the forward pass and for their gradients in the backward pass.
    """

    stage: int
    to_stage: int
    values: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class OperatorRow:
    """The sharding of one operator.

    Args:
        name: name of the operator, which begins with its module path.
        operator: the ATen operator, such as `aten.linear`.
        rule: the operator's sharding rule as text; None for an operator without a rule, which is
            replicated.
        inputs: name, shape and role (`input`, `parameter`, ...) of each tensor input.
        outputs: shape of each output.
        cuts: the names of the mesh axes that shard each sharded factor, by factor.
        input_layouts: the layout in which the operator reads each input.
        output_layouts: the layout in which the operator produces each output.
        redistributions: redistributions of the inputs, and collectives inside the operator.
        source: the line of user code that called the operator.
        main: whether the search chose the cuts by cost; False if they follow from the neighbors.
        pinned: whether the user fixed the cuts.
        segment: name of the activation checkpointing segment; empty if the operator is not
            recomputed.
        stage: index of the pipeline stage that computes the operator.
        seconds: computation time in one micro-batch, forward and backward; 0 without a cluster.
        meanings: name of the `partition.axis_meaning.Meaning` of each sharded factor, in lower
            case, such as `batch`, by factor. Factors of unknown meaning are missing.
    """

    name: str
    operator: str
    rule: str | None
    inputs: tuple[tuple[str, Shape, str], ...]
    outputs: tuple[Shape, ...]
    cuts: dict[str, tuple[str, ...]]
    input_layouts: tuple[TensorLayout, ...]
    output_layouts: tuple[TensorLayout, ...]
    redistributions: tuple[RedistributionRow, ...]
    source: str
    main: bool
    pinned: bool = False
    segment: str = ""
    stage: int = 0
    seconds: float = 0.0
    meanings: dict[str, str] = field(default_factory=dict)

    @property
    def strategy(self) -> Strategy:
        """Number of shards of each dimension of each input."""
        return tuple(layout.shard_counts for layout in self.input_layouts)

    @property
    def bytes(self) -> int:
        """Communication volume of the redistributions of one device, forward and backward."""
        return sum(c.forward_bytes + c.backward_bytes for c in self.redistributions)


@dataclass(frozen=True)
class StepRow:
    """The predicted time of a training step on a cluster.

    Args:
        cluster: name of the cluster.
        seconds: time of the step.
        computation: seconds of computation on the busiest stage.
        communication: seconds of exposed communication within a stage; the maximum over stages.
        bubble: pipeline bubbles, as a fraction of the time of all stages.
        utilization: model FLOPs utilization: matrix products without recomputation, as a fraction
            of the devices' peak; None if not predicted.
        parts: seconds by component of the step time; empty if not predicted.
    """

    cluster: str
    seconds: float
    computation: float
    communication: float
    bubble: float = 0.0
    utilization: float | None = None
    parts: tuple[TimePart, ...] = ()


def is_notable(row: OperatorRow) -> bool:
    """Whether tables show an operator by default.

    These operators communicate, have no sharding rule, or have cuts that the search chose by cost
    or the user fixed.
    """
    # All others follow their neighbors without communication, and are most of the operators of a
    # model.
    return row.main or row.pinned or row.rule is None or row.bytes > 0


def shape_text(sizes: Shape) -> str:
    """Format a shape.

    >>> shape_text((4, 8, 32))
    '4×8×32'
    """
    # A scalar has no sizes, and one element.
    return "×".join(map(str, sizes)) or "1"


def shapes_text(row: OperatorRow) -> str:
    """Format the shapes of an operator's inputs and outputs: `32×64 512×64 → 32×512`."""
    inputs = " ".join(shape_text(sizes) for _, sizes, _ in row.inputs)
    return f"{inputs} → {' '.join(map(shape_text, row.outputs))}"


def devices_text(mesh: DeviceMatrix, stages: int) -> str:
    """Format the number of devices of all stages, with the sizes of the mesh axes.

    >>> devices_text(DeviceMatrix((4, 2), ("dp", "tp")), stages=1)
    '8 devices: dp 4, tp 2'
    >>> devices_text(DeviceMatrix((4, 2), ("dp", "tp")), stages=2)
    '16 devices: pp 2, dp 4, tp 2'
    """
    axes = [f"pp {stages}"] if stages > 1 else []
    axes += [mesh.sizes] if mesh.device_matrix else []
    count = mesh.num_devices * stages
    # One device has no axes to list.
    return ": ".join((f"{count} device{'s' if count > 1 else ''}", ", ".join(axes))).rstrip(": ")


def cuts_text(row: OperatorRow) -> str:
    """Format the sharded factors of an operator with their mesh axes: `b/dp·sp, k/tp`."""
    return ", ".join(f"{factor}/{'·'.join(axes)}" for factor, axes in row.cuts.items())


def strategy_text(strategy: Strategy) -> str:
    """Format a strategy as a tuple without spaces.

    >>> strategy_text(((2, 4), (4,)))
    '((2,4),(4,))'
    """
    # A tuple of one has a trailing comma, as in Python.
    inner = ",".join(f"({','.join(map(str, c))}{',' if len(c) == 1 else ''})" for c in strategy)
    return f"({inner}{',' if len(strategy) == 1 else ''})"


def seconds_text(seconds: float) -> str:
    """Format a duration with three significant digits, in s, ms or μs.

    >>> seconds_text(1.24), seconds_text(0.0351), seconds_text(0.00021)
    ('1.24 s', '35.1 ms', '210 μs')
    """
    # In the largest unit in which the number is at least 1.
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} μs"

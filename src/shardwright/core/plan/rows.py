"""The rows of a plan: shapes, cuts, redistributions and bytes of each operator, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.core.cost.time_parts import TimePart
from shardwright.core.layout.axes import Shape
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout

Strategy = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RedistributionRow:
    """The redistribution of a value from its producer's layout to the one a consumer reads.

    Args:
        value: name of the value; empty for collectives inside an operator.
        steps: one description per collective.
        forward_bytes, backward_bytes: bytes that one device sends. Steps shared with an earlier
            consumer of the value are counted there.
        shared: whether some of the steps are shared with an earlier consumer.
        input: index of the redistributed input; None if the value is not an input.
    """

    value: str
    steps: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    shared: bool
    input: int | None = None

    @property
    def steps_text(self) -> str:
        """All steps on one line."""
        return ", then ".join(self.steps)


@dataclass(frozen=True)
class CrossingRow:
    """The point-to-point communication between two consecutive chunks on different stages.

    Args:
        stage, to_stage: the sending and the receiving stage.
        values: names of the values sent.
        forward_bytes, backward_bytes: bytes that one device sends per micro-batch: the values
            forward, their gradients backward.
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
        rule: its sharding rule as text; None if it has no rule and is replicated.
        inputs: name, shape and kind (`input`, `parameter`, ...) of each tensor input.
        outputs: shape of each output.
        cuts: for each sharded factor, the names of the mesh axes that shard it.
        input_layouts: the layout in which it reads each input.
        output_layouts: the layout in which it produces each output.
        redistributions: redistributions of its inputs, and collectives inside it.
        source: the line of user code that called it.
        main: whether the search chose its cuts by their cost.
        pinned: whether the user fixed its cuts.
        segment: its segment of activation checkpointing; empty if it is not recomputed.
        stage: the pipeline stage that computes it.
        seconds: computation time in one micro-batch, forward and backward; 0 without a cluster.
        meanings: for each sharded factor, the origin of its dimension: a
            `partition.axis_meaning.Meaning` in lower case. Factors of unknown origin are missing.
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
        """The number of shards of each dimension of each input."""
        return tuple(layout.shard_counts for layout in self.input_layouts)

    @property
    def bytes(self) -> int:
        """Bytes that one device sends for the redistributions, forward and backward."""
        return sum(c.forward_bytes + c.backward_bytes for c in self.redistributions)


@dataclass(frozen=True)
class StepRow:
    """The predicted time of a training step on a cluster.

    Args:
        cluster: name of the cluster.
        seconds: time of the step.
        computation: seconds of computation on the busiest stage.
        communication: seconds of exposed communication within a stage; the maximum over stages.
        bubble: fraction of all stages' time that is pipeline bubbles.
        utilization: model FLOPs utilization: matrix products without recomputation, as a fraction
            of the devices' peak; None if not predicted.
        parts: the seconds by kind of work; empty if not predicted.
    """

    cluster: str
    seconds: float
    computation: float
    communication: float
    bubble: float = 0.0
    utilization: float | None = None
    parts: tuple[TimePart, ...] = ()


def is_notable(row: OperatorRow) -> bool:
    """Whether the table shows the operator by default."""
    return row.main or row.pinned or row.rule is None or row.bytes > 0


def shape_text(sizes: Shape) -> str:
    """
    >>> shape_text((4, 8, 32))
    '4×8×32'
    """
    return "×".join(map(str, sizes)) or "1"


def shapes_text(row: OperatorRow) -> str:
    """Input and output shapes: `32×64 512×64 → 32×512`."""
    inputs = " ".join(shape_text(sizes) for _, sizes, _ in row.inputs)
    return f"{inputs} → {' '.join(map(shape_text, row.outputs))}"


def devices_text(mesh: DeviceMatrix, stages: int) -> str:
    """
    >>> devices_text(DeviceMatrix((4, 2), ("dp", "tp")), stages=1)
    '8 devices: dp 4, tp 2'
    >>> devices_text(DeviceMatrix((4, 2), ("dp", "tp")), stages=2)
    '16 devices: pp 2, dp 4, tp 2'
    """
    axes = [f"pp {stages}"] if stages > 1 else []
    axes += [mesh.sizes] if mesh.device_matrix else []
    count = mesh.num_devices * stages
    return ": ".join((f"{count} device{'s' if count > 1 else ''}", ", ".join(axes))).rstrip(": ")


def cuts_text(row: OperatorRow) -> str:
    """Each sharded factor with its mesh axes: `b/dp·sp, k/tp`."""
    return ", ".join(f"{factor}/{'·'.join(axes)}" for factor, axes in row.cuts.items())


def strategy_text(strategy: Strategy) -> str:
    """
    >>> strategy_text(((2, 4), (4,)))
    '((2,4),(4,))'
    """
    inner = ",".join(f"({','.join(map(str, c))}{',' if len(c) == 1 else ''})" for c in strategy)
    return f"({inner}{',' if len(strategy) == 1 else ''})"


def seconds_text(number: float) -> str:
    """
    >>> seconds_text(1.24), seconds_text(0.0351), seconds_text(0.00021)
    ('1.24 s', '35.1 ms', '210 μs')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if number * scale >= 1:
            return f"{number * scale:.3g} {unit}"
    return f"{number * 1e6:.3g} μs"

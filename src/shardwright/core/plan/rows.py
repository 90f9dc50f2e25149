"""The rows of a plan: for each operator its shapes, cuts, redistributions and bytes."""

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
        value: its name; empty for the all-reduces inside an operator.
        steps: one description per collective.
        forward_bytes, backward_bytes: sent by one device for the steps that no earlier consumer
            of the value needs too.
        shared: whether an earlier operator shares some of the steps.
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
        """The steps in one line."""
        return ", then ".join(self.steps)


@dataclass(frozen=True)
class CrossingRow:
    """The values that one chunk of a model sends to the next, if they are on different stages.

    Args:
        stage, to_stage: the sending and the receiving stage.
        values: names of the values.
        forward_bytes, backward_bytes: sent by one device per micro-batch: the values forward,
            their gradients backward.
    """

    stage: int
    to_stage: int
    values: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class OperatorRow:
    """What was decided about one operator.

    Args:
        name: module path.
        operator: its target, `aten.linear`.
        rule: its sharding rule as text; None if it has none, so that every device computes it in
            full.
        inputs: name, shape and kind of each tensor input.
        outputs: shapes.
        cuts: factor → names of the axes that shard it.
        input_layouts: the layout in which it reads each input.
        output_layouts: the layout in which it produces each output.
        redistributions: redistributions of its inputs, and all-reduces inside it.
        source: the line of user code.
        main: whether the search chose its cuts by cost.
        pinned: whether the user fixed its cuts.
        segment: the recompute segment it belongs to; empty if it is not recomputed in the
            backward pass.
        stage: the pipeline stage that computes it.
        seconds: of its computation in one micro-batch, forward and backward, if a cluster was
            named.
        meanings: for each factor that is cut where its dimension comes from, in lower case the
            `partition.axis_meaning.Meaning`, if that is known.
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
        """Bytes that one device sends for its redistributions, forward and backward."""
        return sum(c.forward_bytes + c.backward_bytes for c in self.redistributions)


@dataclass(frozen=True)
class StepRow:
    """The predicted time of a training step on a cluster, in seconds.

    Args:
        cluster: its name.
        seconds: of the step.
        computation: of the busiest stage.
        communication: exposed communication within a stage, of the stage that has most of it.
        bubble: fraction of all stages' time that is pipeline bubbles.
        utilization: fraction of the devices' peak that the model's matrix products need, without
            recomputation; None if it was not predicted.
        parts: what takes the seconds; none if that was not predicted.
    """

    cluster: str
    seconds: float
    computation: float
    communication: float
    bubble: float = 0.0
    utilization: float | None = None
    parts: tuple[TimePart, ...] = ()


def is_notable(row: OperatorRow) -> bool:
    """Whether the table shows the operator by default: it does not merely follow its neighbors."""
    return row.main or row.pinned or row.rule is None or row.bytes > 0


def shape_text(sizes: Shape) -> str:
    """
    >>> shape_text((4, 8, 32))
    '4×8×32'
    """
    return "×".join(map(str, sizes)) or "1"


def shapes_text(row: OperatorRow) -> str:
    """`32×64 512×64 → 32×512`: the shapes of what it reads and makes."""
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
    """`b/dp·sp, k/tp`: each sharded factor with its axes."""
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

"""What a plan tells of each operator, ready to be read: shapes, cuts, conversions and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.layout.axes import Shape
from shardwright.layout.layout import TensorLayout

Strategy = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ConversionRow:
    """A value's way from the layout in which it is made to the one in which it is read.

    Args:
        value: its name; empty for the all-reduces inside an operator.
        steps: the collectives, in words.
        forward_bytes, backward_bytes: what one device sends for the steps that no other consumer
            of the value has asked for before.
        shared: whether some step is shared with an operator above.
        input: index of the input that is read so; None for what is no input.
    """

    value: str
    steps: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    shared: bool
    input: int | None = None


@dataclass(frozen=True)
class CrossingRow:
    """What goes from one part of a model to the next, if they lie on different stages.

    Args:
        stage, to_stage: of the two parts.
        values: names of what crosses.
        forward_bytes, backward_bytes: that one device sends for one micro-batch: there the values,
            back their gradients.
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
        operator: what it computes, `aten.linear`.
        rule: its sharding rule in words; None if it has none and is computed whole everywhere.
        inputs: name, shape and kind of each tensor input.
        outputs: shapes.
        cuts: factor → the axes that cut it, by name.
        read: the layout in which each input is read.
        made: the layout in which each output is made.
        conversions: of its inputs, and all-reduces inside it.
        source: the user's line.
        main: whether the search decided it by cost.
        pinned: whether the user said how it is cut.
        segment: the operators that it is computed again with in the backward pass; empty if it is
            computed once.
        stage: the pipeline stage that computes it.
    """

    name: str
    operator: str
    rule: str | None
    inputs: tuple[tuple[str, Shape, str], ...]
    outputs: tuple[Shape, ...]
    cuts: dict[str, tuple[str, ...]]
    read: tuple[TensorLayout, ...]
    made: tuple[TensorLayout, ...]
    conversions: tuple[ConversionRow, ...]
    source: str
    main: bool
    pinned: bool = False
    segment: str = ""
    stage: int = 0

    @property
    def strategy(self) -> Strategy:
        """In how many equal parts each dimension of each input is cut."""
        return tuple(layout.shard_counts for layout in self.read)

    @property
    def bytes(self) -> int:
        """Bytes that one device sends for the conversions of its inputs, forward and backward."""
        return sum(c.forward_bytes + c.backward_bytes for c in self.conversions)


@dataclass(frozen=True)
class StepRow:
    """What a training step takes on a cluster, in seconds.

    Args:
        cluster: its name.
        seconds: the whole step.
        computation: what the busiest stage computes.
        communication: what a stage waits at most for communication within it.
        bubble: the share of all stages' time in which they wait for another.
    """

    cluster: str
    seconds: float
    computation: float
    communication: float
    bubble: float = 0.0


def is_notable(row: OperatorRow) -> bool:
    """Whether there is more to say of an operator than that it follows its neighbors."""
    return row.main or row.pinned or row.rule is None or row.bytes > 0


def shape_text(sizes: Shape) -> str:
    """
    >>> shape_text((4, 8, 32))
    '4×8×32'
    """
    return "×".join(map(str, sizes)) or "1"


def cuts_text(row: OperatorRow) -> str:
    """`b/ab, k/c`: each factor that is cut, with its axes."""
    return ", ".join(f"{factor}/{''.join(axes)}" for factor, axes in row.cuts.items())


def strategy_text(parts: Strategy) -> str:
    """
    >>> strategy_text(((2, 4), (4,)))
    '((2,4),(4,))'
    """
    inner = ",".join(f"({','.join(map(str, p))}{',' if len(p) == 1 else ''})" for p in parts)
    return f"({inner}{',' if len(parts) == 1 else ''})"


def seconds_text(number: float) -> str:
    """
    >>> seconds_text(1.24), seconds_text(0.0351), seconds_text(0.00021)
    ('1.24 s', '35.1 ms', '210 μs')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if number * scale >= 1:
            return f"{number * scale:.3g} {unit}"
    return f"{number * 1e6:.3g} μs"

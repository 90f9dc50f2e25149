"""What a page shows, as texts and fractions; the template only places it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TypeVar

from shardwright.core.cost.memory import binary
from shardwright.core.plan.rows import seconds_text
from shardwright.errors import PlanError, needs_extra
from shardwright.tools.report.picture import Picture

Size = TypeVar("Size", int, float)
"""Bytes or seconds."""


@dataclass(frozen=True)
class Headline:
    """One of the figures that answer first.

    Args:
        state: `good`, `bad` or empty.
    """

    label: str
    text: str
    note: str = ""
    state: str = ""


@dataclass(frozen=True)
class Bar:
    """A row of a waterfall; lengths are fractions of the whole.

    Args:
        kind: what it is, which gives its color.
        start, length: where it begins and how long it is.
        hidden: the length of what goes on beside others, before its start.
    """

    label: str
    kind: str
    text: str
    start: float
    length: float
    hidden: float = 0.0
    note: str = ""


def stacked(
    sizes: Mapping[str, Size], whole: float, text: Callable[[Size], str]
) -> tuple[Bar, ...]:
    """Bars one after the other, one for each kind, with its size as `text`."""
    starts = accumulate(sizes.values(), initial=0)
    return tuple(
        Bar(kind, kind, text(size), start / whole, size / whole)
        for (kind, size), start in zip(sizes.items(), starts, strict=False)
    )


@dataclass(frozen=True)
class Stack:
    """A row of bars one after the other; lengths are fractions of the page's width.

    Args:
        limit: where the limit is; None if there is none.
    """

    label: str
    text: str
    bars: tuple[Bar, ...]
    limit: float | None = None
    state: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis of the device matrix, with what it is for."""

    name: str
    size: int
    meaning: str


@dataclass(frozen=True)
class OperatorTensor:
    """A tensor that an operator reads or makes.

    Args:
        picture: the number of the picture that shows its layout.
        stored: how it is stored, where that is another layout.
    """

    name: str
    kind: str
    shape: str
    local_shape: str
    placement: str
    picture: int
    stored: str = ""


@dataclass(frozen=True)
class Operator:
    """An operator, or equal ones of repeated blocks.

    Args:
        path: its module path, with the numbers of all blocks.
        count: how many they are.
        cuts: each sharded factor with the numbers of its axes.
        bytes, seconds: of all of them.
        redistributions: each with its value, its steps and its bytes in words.
        why: `pinned`, `decided`, `follows` or `no rule`; `reason` says it in words.
    """

    name: str
    path: str
    operator: str
    count: int
    shapes: str
    cuts: tuple[tuple[str, tuple[int, ...]], ...]
    bytes: int
    seconds: float
    why: str
    reason: str
    facts: tuple[tuple[str, str], ...]
    inputs: tuple[OperatorTensor, ...]
    outputs: tuple[OperatorTensor, ...]
    redistributions: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Branch:
    """A module with what is in it, in the order of the model."""

    name: str
    path: str
    children: tuple[Branch | Operator, ...]

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The numbers of the axes that cut something in it."""
        inside = (
            each.axes if isinstance(each, Branch) else (a for _, axes in each.cuts for a in axes)
            for each in self.children
        )
        return tuple(sorted(set(chain.from_iterable(inside))))

    @cached_property
    def count(self) -> int:
        """Of the operators in it."""
        return sum(child.count for child in self.children)

    @cached_property
    def bytes(self) -> int:
        return sum(child.bytes for child in self.children)

    @cached_property
    def seconds(self) -> float:
        return sum(child.seconds for child in self.children)


@dataclass(frozen=True)
class Lane:
    """What one stage does over time.

    Args:
        spans: kind (`F`, `B`, `I`, `W`), micro-batch, text, start and length of each action;
            fractions of the whole.
    """

    label: str
    note: str
    spans: tuple[tuple[str, int, str, float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Columns of equal width, one for each moment.

    Args:
        columns: kind, text and height of each; fractions of the whole.
        limit: its height; None if there is none.
    """

    label: str
    text: str
    columns: tuple[tuple[str, str, float], ...]
    limit: float | None = None


@dataclass(frozen=True)
class Chart:
    """Rows of bars with what explains them.

    Args:
        rows: a waterfall has one bar each; memory has stacks.
        note: a sentence below; alone where there is nothing to draw.
        header, table: the same in numbers.
    """

    rows: tuple[Bar | Stack, ...] = ()
    kinds: tuple[str, ...] = ()
    note: str = ""
    header: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class OtherPlan:
    """Another plan, or the one of the page.

    Args:
        sentence: what was chosen, or why there is no such plan.
        rows: its step, its memory and what it sends, against those of the others.
        changes: what it decides otherwise.
    """

    name: str
    sentence: str
    rows: tuple[Stack, ...] = ()
    changes: Chart = Chart()


@dataclass(frozen=True)
class Page:
    """All that a page shows.

    Args:
        measured: what was measured, beside what was predicted; nothing if it was not.
    """

    title: str
    sentence: str
    headlines: tuple[Headline, ...]
    notes: tuple[str, ...]
    time: Chart
    measured: tuple[Chart, ...]
    memory: Chart
    curves: tuple[Curve, ...]
    largest: Chart
    lanes: tuple[Lane, ...]
    pipeline_note: str
    stages: Chart
    traffic: Chart
    others: Chart
    other_plans: tuple[OtherPlan, ...]
    axes: tuple[Axis, ...]
    tree: tuple[Branch | Operator, ...]
    pictures: tuple[Picture, ...]
    origin: str


def page_html(page: Page) -> str:
    """The page as one HTML text; what comes from the model is text in it, whatever it holds.

    Raises:
        PlanError: if jinja2 is not installed.
    """
    with needs_extra("tools", "a report needs jinja2", PlanError):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(
        loader=PackageLoader("shardwright.tools.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"binary": binary, "seconds": seconds_text}
    return environment.get_template("page.html").render(page=page)

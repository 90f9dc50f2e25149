"""Content of a report page as dataclasses, with all lengths as fractions, and rendering to HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TypeVar

from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.rows import seconds_text
from shardwright.errors import PlanError, needs_extra, printable
from shardwright.tools.report.picture import Picture

Size = TypeVar("Size", int, float)
"""A size in bytes (int) or a time in seconds (float)."""


@dataclass(frozen=True)
class Headline:
    """A key figure at the top of the page.

    Args:
        state: `good`, `bad` or empty; determines the color.
    """

    label: str
    figure: str
    note: str = ""
    state: str = ""


@dataclass(frozen=True)
class Bar:
    """A bar of a waterfall; lengths are fractions of the total.

    Args:
        category: category of time or memory, which determines the color.
        start, length: position of the left end, and length of the visible bar.
        hidden: length of the part that overlaps earlier bars, drawn left of `start`.
    """

    label: str
    category: str
    size_text: str
    start: float
    length: float
    hidden: float = 0.0
    note: str = ""


def stack_bars(
    sizes: Mapping[str, Size], full_width: float, format_size: Callable[[Size], str]
) -> tuple[Bar, ...]:
    """Return adjacent bars, one for each type of memory or time.

    Args:
        sizes: bytes or seconds of each bar, by category of memory or time.
        full_width: size of a bar of length 1.
        format_size: formats a size as the label of its bar.
    """
    # One start more than there are bars: the end of the last one.
    starts = accumulate(sizes.values(), initial=0)
    return tuple(
        Bar(category, category, format_size(size), start / full_width, size / full_width)
        for (category, size), start in zip(sizes.items(), starts, strict=False)
    )


@dataclass(frozen=True)
class Stack:
    """A row of adjacent bars; lengths are fractions of the row's width.

    Args:
        limit: position of the limit line; None without a limit.
        state: `bad` for a size over the limit, otherwise empty.
    """

    label: str
    size_text: str
    bars: tuple[Bar, ...]
    limit: float | None = None
    state: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis of the device matrix; `meaning` is its purpose, such as data parallel."""

    name: str
    size: int
    meaning: str


@dataclass(frozen=True)
class OperatorTensor:
    """An input or output of an operator.

    Args:
        picture: index of the layout's picture in `Page.pictures`.
        stored: placement in which a parameter is stored; empty if equal to `placement`.
    """

    name: str
    origin: str
    shape: str
    local_shape: str
    placement: str
    picture: int
    stored: str = ""


@dataclass(frozen=True)
class Operator:
    """An operator, or equal operators of repeated blocks.

    Args:
        path: module path, with the indices of all blocks.
        count: number of equal operators.
        cuts: sharded factors, with the indices of their mesh axes.
        bytes, seconds: totals over the equal operators.
        why: origin of the sharding: `pinned`, `decided`, `follows` or `no rule`.
        reason: the origin as a sentence.
        redistributions: value, steps and bytes of each redistribution, as text.
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
    """A module with its children, in the order of the model."""

    name: str
    path: str
    children: tuple[Branch | Operator, ...]

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Sorted indices of the mesh axes that shard any operator in the module."""
        inside = (
            each.axes if isinstance(each, Branch) else (a for _, axes in each.cuts for a in axes)
            for each in self.children
        )
        return tuple(sorted(set(chain.from_iterable(inside))))

    @cached_property
    def count(self) -> int:
        """Number of operators in the module and its submodules."""
        return sum(child.count for child in self.children)

    @cached_property
    def bytes(self) -> int:
        return sum(child.bytes for child in self.children)

    @cached_property
    def seconds(self) -> float:
        return sum(child.seconds for child in self.children)


@dataclass(frozen=True)
class Lane:
    """The timeline of one pipeline stage.

    Args:
        spans: action (`F` forward, `B` backward, `I` input gradient, `W` weight gradient),
            micro-batch, text, start and length of each action; start and length are fractions of
            the step.
    """

    label: str
    note: str
    spans: tuple[tuple[str, int, str, float, float], ...]


@dataclass(frozen=True)
class Curve:
    """A bar chart over time.

    Args:
        columns: color category, text and height of each bar; heights are fractions of the chart's
            height.
        limit: height of the limit line; None without a limit.
    """

    label: str
    peak_text: str
    columns: tuple[tuple[str, str, float], ...]
    limit: float | None = None


@dataclass(frozen=True)
class Chart:
    """A chart of a report page: rows of bars, with a note and a table.

    Args:
        rows: bars of a waterfall, or stacks.
        legend: entries of the legend.
        note: text below the chart; the only content of a chart without bars.
        header, table: column titles and rows of the table below.
    """

    rows: tuple[Bar | Stack, ...] = ()
    legend: tuple[str, ...] = ()
    note: str = ""
    header: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class OtherPlan:
    """One plan in the comparison of the page's plan with others.

    Args:
        sentence: summary of the parallelism, or the reason why the plan does not exist.
        rows: step time, memory and communication volume, on scales that all plans share.
        changes: differences from the plan of the page.
    """

    name: str
    sentence: str
    rows: tuple[Stack, ...] = ()
    changes: Chart = Chart()


@dataclass(frozen=True)
class Page:
    """The content of a report page.

    Args:
        measured: charts of measurements next to predictions; empty without measurements.
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
    """Render a page as HTML.

    Raises:
        PlanError: if `jinja2` is not installed.
    """
    with needs_extra("tools", "a report needs `jinja2`", PlanError):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    def escape_controls(value: object) -> object:
        # HTML of the template, whose texts are escaped already, has the attribute `__html__`.
        if isinstance(value, str) and not hasattr(value, "__html__"):
            return printable(value)
        return value

    environment = Environment(
        loader=PackageLoader("shardwright.tools.report", "."),
        autoescape=True,  # Names of modules may contain any characters.
        # A misspelled field raises an error instead of rendering as nothing.
        undefined=StrictUndefined,
        # Characters that change the order of the page's text, or that UTF-8 cannot encode.
        finalize=escape_controls,
        # Lines that only have a tag of the template leave no empty lines.
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"binary": bytes_text, "seconds": seconds_text}
    return environment.get_template("page.html").render(page=page)

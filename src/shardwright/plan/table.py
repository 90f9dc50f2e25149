"""A plan as text for people: the table that `print(plan)` shows."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console
from rich.table import Table

from shardwright.cost.memory import binary
from shardwright.plan.folding import Fold, folded
from shardwright.plan.plan import Plan
from shardwright.plan.rows import OperatorRow
from shardwright.plan.summary import summary
from shardwright.plan.words import cuts, shape, strategy, tells

WIDTH = 140
"""Columns that `print(plan)` takes, and `shardwright plan` when it does not go to a terminal."""


def text(plan: Plan, every: bool = False, width: int = WIDTH) -> str:
    """Table and summary as plain text."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(table(plan, every))
    console.print("\n".join(summary(plan, every)), highlight=False, markup=False, soft_wrap=True)
    written: StringIO = console.file  # type: ignore[assignment]
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def table(plan: Plan, every: bool = False) -> Table:
    """Operator, shapes, cuts, strategy, conversions and bytes; equal blocks as one row.

    Args:
        every: show also the operators that follow their neighbours without talking.
    """
    sizes = "·".join(str(size) for size in plan.mesh.device_matrix) or "1"
    names = "".join(plan.mesh.alias_names)
    staged = plan.pipeline.stages > 1
    stages = f"{plan.pipeline.stages} stages x " if staged else ""
    title = f"Plan for {plan.devices} devices = {stages}{sizes}"
    title += f", axes {names}" if names else ""
    shown = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in ("operator", "shapes", "cuts", "strategy", "conversions: forward / backward"):
        shown.add_column(column, overflow="fold")
    shown.add_column("bytes", justify="right", no_wrap=True)
    if staged:
        shown.add_column("stage", justify="right", no_wrap=True)
    for fold in folded([row for row in plan.operators if every or tells(row)]):
        row = fold.row
        shown.add_row(
            row.name,
            _shapes(row),
            cuts(row) if row.rule is not None else "no rule: whole",
            _strategy(fold),
            "\n".join(_conversions(row)),
            binary(row.bytes) if row.bytes else "",
            *([fold.stages] if staged else []),
            style="bold" if row.main else None,
        )
    return shown


def _shapes(row: OperatorRow) -> str:
    inputs = " ".join(shape(sizes) for _, sizes, _ in row.inputs)
    return f"{inputs} → {' '.join(map(shape, row.outputs))}"


def _strategy(fold: Fold) -> str:
    """In how many parts each input is cut, where it is; marked where the user said so, and where
    operators are computed again in the backward pass."""
    row = fold.row
    parts = strategy(row.strategy) if row.cuts or row.pinned else ""
    return " ".join(word for word in (parts, "pinned" if row.pinned else "", fold.again) if word)


def _conversions(row: OperatorRow) -> Iterable[str]:
    for conversion in row.conversions:
        words = [part for part in conversion.value.split(".") if not part.isdigit()]
        short = ".".join(words[-2:]) or "inside"
        mark = " (shared)" if conversion.shared else ""
        yield f"{short}: {', then '.join(conversion.steps)}{mark}"

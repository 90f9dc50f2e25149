"""Render a plan as text: the summary of `print(plan)`, or a table of operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.repeated_rows import Fold, fold_crossings, fold_rows
from shardwright.core.plan.rows import (
    OperatorRow,
    cuts_text,
    is_notable,
    shapes_text,
    strategy_text,
)
from shardwright.core.plan.summary import plan_head, plan_notes, plan_summary
from shardwright.core.plan.text_columns import (
    render_lines,
    split_at_dots,
    text_width,
    wrap_sentence,
)


def plan_text(
    plan: PlanData, full: bool = False, every: bool = False, width: int | None = None
) -> str:
    """Render the summary of a plan or, with `full` or `every`, the table of operators.

    Args:
        plan: the plan.
        full: whether to render the table instead of the summary.
        every: whether to render the table, including operators that follow their neighbors without
            communication.
        width: width in characters; by default that of the terminal.
    """
    width = text_width() if width is None else width
    if not full and not every:
        return plan_summary(plan, width)
    table = render_lines(width, plan_table(plan, every, width))
    notes_below = [
        line for note in _format_table_notes(plan, every) for line in wrap_sentence(note, width)
    ]
    return "\n".join([*plan_head(plan, width), *table, *notes_below])


def plan_table(plan: PlanData, every: bool, width: int) -> Table:
    """Return the table of operators, with one row for equal operators of repeated blocks.

    Args:
        plan: the plan.
        every: whether to include operators that follow their neighbors without communication.
        width: width of the table in characters.
    """
    staged = plan.pipeline.stages > 1
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Columns of fixed width: 13 characters for bytes with their padding, 9 for the stage.
    flexible_width = width - 13 - (9 if staged else 0)
    # Percentage of the remaining width, by header.
    columns = {"operator: shapes": 38, "cuts: strategy": 22, "redistribution: forward/backward": 40}
    # One character less, for the padding of each column.
    names, cuts, sent = (flexible_width * percent // 100 - 1 for percent in columns.values())
    for column, size in zip(columns, (names, cuts, sent), strict=True):
        table.add_column(column, overflow="fold", width=size)
    table.add_column("bytes", justify="right", no_wrap=True)
    if staged:
        table.add_column("stage", justify="right", no_wrap=True)
    for fold in fold_rows([row for row in plan.operators if every or is_notable(row)]):
        row = fold.row
        cuts_or_note = cuts_text(row) if row.rule is not None else "no rule: replicated"
        table.add_row(
            "\n".join((*split_at_dots(row.name, names), shapes_text(row))),
            "\n".join(filter(None, (cuts_or_note, _format_strategy_cell(fold)))),
            "\n".join(
                line
                for each in _format_redistribution_lines(row)
                for line in split_at_dots(each, sent)
            ),
            bytes_text(row.bytes) if row.bytes else "",
            *([fold.stages] if staged else []),
        )
    return table


def _format_strategy_cell(fold: Fold) -> str:
    """Format the strategy of a sharded or pinned operator as a table cell, followed by `pinned` and
    `recomputed` where these apply."""
    row = fold.row
    strategy = strategy_text(row.strategy) if row.cuts or row.pinned else ""
    pinned = "pinned" if row.pinned else ""
    return " ".join(word for word in (strategy, pinned, fold.recomputed) if word)


def _format_redistribution_lines(row: OperatorRow) -> Iterable[str]:
    for redistribution in row.redistributions:
        # Without layer numbers, as the row stands for all layers.
        words = [word for word in redistribution.value.split(".") if not word.isdigit()]
        short = ".".join(words[-2:]) or "inside"
        suffix = " (shared)" if redistribution.shared else ""
        yield f"{short}: {redistribution.steps_text}{suffix}"


def _format_table_notes(plan: PlanData, every: bool) -> Iterator[str]:
    samples, micro_batches = plan.global_batch, plan.pipeline.micro_batches
    if samples is not None and micro_batches > 1:
        rows = samples // micro_batches
        yield f"shapes and redistributions are per micro-batch, of {rows:,} rows of the batch"
    for stages, crossing in fold_crossings(plan.crossings):
        yield (
            f"{stages}: {', '.join(crossing.values)};"
            f" {bytes_text(crossing.forward_bytes)} forward,"
            f" {bytes_text(crossing.backward_bytes)} backward per micro-batch"
        )
    yield from _format_stage_memory_lines(plan)
    # With a cluster the head has the bubbles; a plan from a file has no graph to estimate them.
    if plan.pipeline.stages > 1 and plan.step is None and plan.graph is not None:
        yield f"pipeline bubbles: {plan.timeline().bubble:.1%}, estimated from FLOPs alone"
    yield from plan_notes(plan)
    hidden = sum(not is_notable(row) for row in plan.operators)
    if hidden and not every:
        yield (
            f"{hidden} more operators follow their neighbors without communication: "
            "shown with plan.text(every=True), --every"
        )
    yield (
        f"{plan.mode}({plan.options_text}); captured in {plan.capture_seconds:.2f} s, "
        f"searched in {plan.search_seconds * 1e3:.1f} ms"
    )


def _format_stage_memory_lines(plan: PlanData) -> Iterator[str]:
    """Yield the memory of the stage with the highest peak by category, then peaks of other
    stages."""
    if plan.known_memory is None:
        return
    # Of the other stages only the extremes are shown, as a plan may have many.
    *other_stages, largest = sorted(plan.known_memory.stages, key=lambda stage: stage.peak)
    # By size before name, so that the largest category comes first.
    sizes = sorted(((getattr(largest, name), name) for name in largest.NAMES), reverse=True)
    categories = ", ".join(f"{name} {bytes_text(size)}" for size, name in sizes if size)
    yield f"memory at the peak{f' of stage {largest.stage}' if other_stages else ''}: {categories}"
    if other_stages:
        extremes = other_stages if len(other_stages) == 1 else (other_stages[0], other_stages[-1])
        peaks = " to ".join(f"{bytes_text(stage.peak)} (stage {stage.stage})" for stage in extremes)
        yield f"peak memory of the other stage{'s' if len(other_stages) > 1 else ''}: {peaks}"

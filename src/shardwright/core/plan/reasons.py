"""Why an operator is split as it is: where its cuts come from, and what others would cost."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow, seconds_text
from shardwright.core.search.choices import BATCH, COMMUNICATION, MEM_COEFF, AxisChoice, OtherChoice

TURNS = {
    COMMUNICATION: "all communication took {} times as long",
    BATCH: "the batch were {} times as large",
    MEM_COEFF: "mem_coeff were {} times as large",
}


def origin(plan: PlanData, row: OperatorRow) -> tuple[str, str]:
    """Where the cuts of an operator come from, in a word and in a sentence."""
    if row.pinned:
        return "pinned", f"pinned by the user to {plan.pins.get(row.name, 'a strategy')}"
    if row.rule is None:
        return "no rule", "no sharding rule, so every device computes it in full"
    if row.main:
        return "decided", f"a main operator: {plan.mode} chose its cuts by their cost"
    chain = _chain(plan, row)
    if not chain:
        return "follows", "follows the layouts of its neighbors"
    through = f", through {' and '.join(chain[:-1])}" if chain[:-1] else ""
    return "follows", f"follows its neighbors: split as {chain[-1]} is{through}"


def _chain(plan: PlanData, row: OperatorRow) -> list[str]:
    """The shortest way to an operator that was decided or pinned along values that are made and
    read in one layout: its name is the last."""
    seen, ways = {row.name}, [(row, list[str]())]
    for at, way in ways:
        if at.name != row.name and (at.main or at.pinned):
            return way
        for neighbor in _like_neighbors(plan, at):
            if neighbor.name not in seen:
                seen.add(neighbor.name)
                ways.append((neighbor, [*way, neighbor.name]))
    return []


def _like_neighbors(plan: PlanData, row: OperatorRow) -> Iterator[OperatorRow]:
    rows, readers = plan.neighbors
    for (name, _, _), layout in zip(row.inputs, row.input_layouts, strict=True):
        maker = rows.get(name)
        if maker is not None and layout.sharded and maker.output_layouts[:1] == (layout,):
            yield maker
    for place, reader in readers.get(row.name, ()):
        layout = reader.input_layouts[place]
        if layout.sharded and row.output_layouts[:1] == (layout,):
            yield reader


def choice_lines(plan: PlanData, row: OperatorRow) -> Iterator[tuple[str, str]]:
    """For each axis what was chosen, and what else costs; then what would turn that."""
    for choice in plan.choices_of.get(row.name, ()):
        others = ", ".join(_cost(choice, each) for each in choice.alternatives)
        count = len(choice.operators)
        together = (
            f"; all {count} equal operators together" if count > 1 and not choice.symbolic else ""
        )
        yield f"over {choice.axis}", f"{choice.chosen or 'not cut'} chosen; {others}{together}"
        for each in choice.alternatives:
            for knob, factor in each.turns.items():
                text = TURNS[knob].format(f"{factor:.2g}")
                yield "", f"{each.factor or 'no cut'} would cost less if {text}"


def _cost(choice: AxisChoice, other: OtherChoice) -> str:
    name = other.factor or "no cut"
    size = abs(other.cost)
    amount = f"{size:,.4g} (symbolic)" if choice.symbolic else seconds_text(size) + " a step"
    if other.cost < 0:
        return f"{name} {amount} less by itself"
    return f"{name} {amount} more" if size else f"{name} the same"

"""Explain an operator's cuts: who decided (user, search, neighbors), and costs of alternatives."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow, seconds_text
from shardwright.core.search.choices import BATCH, COMMUNICATION, MEM_COEFF, AxisChoice, OtherChoice

BREAK_EVEN_CONDITIONS = {
    COMMUNICATION: "all communication took {} times as long",
    BATCH: "the batch were {} times as large",
    MEM_COEFF: "mem_coeff were {} times as large",
}
"""Condition under which an alternative is cheaper, by quantity; `{}` is the quantity's
multiplier."""


def cut_origin(plan: PlanData, row: OperatorRow) -> tuple[str, str]:
    """Return (label, sentence) about who decided an operator's cuts: user, search or neighbors."""
    # First, as a pin also overrides the choice of the search for a main operator.
    if row.pinned:
        return "pinned", f"pinned by the user to {plan.pins.get(row.name, 'a strategy')}"
    if row.rule is None:
        return "no rule", "no sharding rule, so it is replicated"
    if row.main:
        return "decided", f"a main operator: {plan.mode} chose its cuts by their cost"
    chain = _find_path_to_followed_operator(plan, row)
    if not chain:
        return "follows", "follows the layouts of its neighbors"
    through = f", through {' and '.join(chain[:-1])}" if chain[:-1] else ""
    return "follows", f"follows its neighbors: split as {chain[-1]} is{through}"


def _find_path_to_followed_operator(plan: PlanData, row: OperatorRow) -> list[str]:
    """Return the shortest path from `row` to the main or pinned operator whose sharding it follows.

    The path leads along values that producer and consumer have in the same layout.

    Returns:
        Names of the operators on the path, without `row`; empty if the path reaches no main or
        pinned operator.
    """
    # Each entry is the last operator of a path, and the names on it.
    visited, paths = {row.name}, [(row, list[str]())]
    for end, path in paths:  # breadth first: `paths` grows while it is iterated
        if end.name != row.name and (end.main or end.pinned):
            return path
        for neighbor in _find_same_layout_neighbors(plan, end):
            if neighbor.name not in visited:
                visited.add(neighbor.name)
                paths.append((neighbor, [*path, neighbor.name]))
    return []


def _find_same_layout_neighbors(plan: PlanData, row: OperatorRow) -> Iterator[OperatorRow]:
    """Yield producers and consumers that share a value with `row` in an equal sharded layout."""
    rows, consumers = plan.neighbors
    for (name, _, _), layout in zip(row.inputs, row.input_layouts, strict=True):
        producer = rows.get(name)
        # A replicated value carries no decision, and a redistributed one ends the path.
        if producer is not None and layout.sharded and producer.output_layouts[:1] == (layout,):
            yield producer
    # A single result has the name of its operator; one of several, `split[0]`, ends the path.
    for input_index, consumer in consumers.get(row.name, ()):
        layout = consumer.input_layouts[input_index]
        if layout.sharded and row.output_layouts[:1] == (layout,):
            yield consumer


def choice_lines(plan: PlanData, row: OperatorRow) -> Iterator[tuple[str, str]]:
    """Yield (label, text) lines for each mesh axis.

    The first line has the chosen cut and the cost of each alternative. The next lines have one
    condition each under which an alternative would be cheaper.
    """
    for choice in plan.choices_of.get(row.name, ()):
        others = ", ".join(
            _describe_alternative_cost(choice, other) for other in choice.alternatives
        )
        count = len(choice.operators)
        together = (
            # Seconds are sums over equal operators, symbolic costs are of one.
            f"; all {count} equal operators together" if count > 1 and not choice.symbolic else ""
        )
        yield f"over {choice.axis}", f"{choice.chosen or 'not cut'} chosen; {others}{together}"
        for other in choice.alternatives:
            for quantity, factor in other.multipliers.items():
                condition = BREAK_EVEN_CONDITIONS[quantity].format(f"{factor:.2g}")
                yield "", f"{other.factor or 'no cut'} would cost less if {condition}"


def _describe_alternative_cost(choice: AxisChoice, other: OtherChoice) -> str:
    name = other.factor or "no cut"
    size = abs(other.cost)
    amount = f"{size:,.4g} (symbolic)" if choice.symbolic else seconds_text(size) + " a step"
    # All other operators are fixed here, while the search weighed them together.
    if other.cost < 0:
        return f"{name} {amount} less by itself"
    return f"{name} {amount} more" if size else f"{name} the same"

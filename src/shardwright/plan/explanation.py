"""The story of one operator."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.cost.memory import binary
from shardwright.plan.plan import Plan
from shardwright.plan.rows import ConversionRow, OperatorRow
from shardwright.plan.words import cuts, shape


def explanation(plan: Plan, row: OperatorRow) -> str:
    """Where one operator's inputs come from, how it is cut, and what that costs."""
    lines = [f"{row.name}: {row.operator}" + (f"  ({row.source})" if row.source else "")]
    lines.append(f"  rule: {row.rule or 'none, computed whole on every device'}")
    lines.append(f"  cuts: {cuts(row) or 'nothing'}")
    kind = "a main operator, decided by its cost" if row.main else "decided by its neighbours"
    if row.pinned:
        kind = f"pinned as {plan.pins[row.name]}"
    lines.append(f"  {kind}")
    lines += [f"  {line}" for line in _recomputed(plan, row)]
    ways = {c.input: c for c in row.conversions if c.input is not None}
    for index, ((name, sizes, origin), parts) in enumerate(
        zip(row.inputs, row.strategy, strict=True)
    ):
        cut = f"read in {'·'.join(map(str, parts))} parts" if max(parts, default=1) > 1 else "whole"
        lines.append(f"  input {name} {shape(sizes)} ({origin}): {cut}")
        if origin == "parameter" and name in plan.storage:
            kept = tuple(plan.mesh.size(axes) for axes in plan.storage[name])
            lines.append(f"    stored in {'·'.join(map(str, kept)) or '1'} parts")
        if index in ways:
            lines += [f"    {line}" for line in _conversion_lines(ways[index])]
    for conversion in row.conversions:
        if conversion.input is None:
            lines += [f"  {line}" for line in _conversion_lines(conversion)]
    lines.append(f"  output {', '.join(map(shape, row.outputs))}")
    return "\n".join(lines)


def _recomputed(plan: Plan, row: OperatorRow) -> Iterable[str]:
    """How the operator is computed again in the backward pass, if that was asked."""
    said = plan.recompute.get(row.name)
    if row.segment and said is not None:
        count = sum(other.segment == row.segment for other in plan.operators)
        others = f", with {count - 1} more operators" if count > 1 else ""
        conversions = "are made again too" if said.communication else "are kept"
        yield f"computed again in the backward pass in segment {row.segment}{others};"
        yield f"conversions inside {conversions}"
    elif said is not None:
        yield f"in segment {said.segment}, but computed once: nothing is kept of it"


def _conversion_lines(conversion: ConversionRow) -> Iterable[str]:
    yield from conversion.steps
    shared = ", the rest shared with an operator before" if conversion.shared else ""
    yield (
        f"sends {binary(conversion.forward_bytes)} forward, "
        f"{binary(conversion.backward_bytes)} backward{shared}"
    )

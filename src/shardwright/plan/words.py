"""What rows of a plan hold, in words."""

from __future__ import annotations

from shardwright.plan.rows import OperatorRow, Shape, Strategy


def tells(row: OperatorRow) -> bool:
    """Whether there is more to say of an operator than that it follows its neighbours."""
    return row.main or row.pinned or row.rule is None or row.bytes > 0


def shape(sizes: Shape) -> str:
    """
    >>> shape((4, 8, 32))
    '4×8×32'
    """
    return "×".join(map(str, sizes)) or "1"


def cuts(row: OperatorRow) -> str:
    """`b/ab, k/c`: each factor that is cut, with its axes."""
    return ", ".join(f"{factor}/{''.join(axes)}" for factor, axes in row.cuts.items())


def strategy(parts: Strategy) -> str:
    """
    >>> strategy(((2, 4), (4,)))
    '((2,4),(4,))'
    """
    inner = ",".join(f"({','.join(map(str, p))}{',' if len(p) == 1 else ''})" for p in parts)
    return f"({inner}{',' if len(parts) == 1 else ''})"


def seconds(number: float) -> str:
    """
    >>> seconds(1.24), seconds(0.0351), seconds(0.00021)
    ('1.24 s', '35.1 ms', '210 μs')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if number * scale >= 1:
            return f"{number * scale:.3g} {unit}"
    return f"{number * 1e6:.3g} μs"

"""A lower bound of what any plan costs, by which a plan is certified.

Operators are variables, their choices the numbers of axes that cut each factor. What operators cost
by themselves and what lies between two of them at least are tables, and the least sum of tables is
bounded by moving costs between them until nothing is gained: the sum of the least entries of all
tables is never above the least sum (Kolmogorov, "Convergent tree-reweighted message passing for
energy minimization", 2006). So every state of the messages proves a bound. Three things count less
than they cost:

- Readers of one value share redistributions: together they pay at least a weighted mean of what
  each would pay alone. Those that pay most in the known plan have the weight.
- Of communication that computation may hide, a share between 0 and 1 counts.
- Which axes cut a dimension is left open, but for their sizes and links.

Messages are found with one block for all that repeat; the bound is that of all blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

import numpy as np

from shardwright.core.search.by_time.count_tables import Array, CountTables
from shardwright.core.search.by_time.problem import SearchProblem, TensorEdge
from shardwright.progress import OnShare, ignore_share, track

ROUNDS = 60
"""At most so many times messages go through all operators, there and back."""

GAIN = 5e-4
"""Relative; less in one round is none."""

ByEnd = list[Array]
"""What a table passes to each of its two ends, for each way to cut that operator."""


def lower_bound(
    tables: CountTables, every: SearchProblem, on_share: OnShare = ignore_share
) -> float:
    """What a plan costs at least.

    Args:
        tables: of a problem, with blocks that repeat as one.
        every: the same problem with all blocks.
        on_share: of the rounds.
    """
    messages = _Messages(tables)
    best = messages.converged(on_share)
    if tables.problem is every:
        return best
    return _of_all(tables, every, messages.passed())


class _Messages:
    """Messages from each table to its two ends, by the layouts of the value there."""

    def __init__(self, tables: CountTables) -> None:
        self.tables = tables
        self._messages = [[np.zeros(len(side.first)) for side in p.sides] for p in tables.pairs]
        self._around: list[list[tuple[int, int]]] = [[] for _ in tables.op_costs]
        for number, pair in enumerate(tables.pairs):
            for end, variable in enumerate(pair.ends):
                self._around[variable].append((number, end))

    def converged(self, on_share: OnShare) -> float:
        """The bound when a round gains nothing; that of the folded problem."""
        best = -np.inf
        for _ in track(range(ROUNDS), on_share):
            self._sweep(backward=True)
            bound = self._sweep(backward=False)
            if bound <= best + GAIN * abs(best):
                return max(best, bound)
            best = bound
        return best

    def _sweep(self, backward: bool) -> float:
        """Each operator tells those after it what it costs them; the bound that this proves."""
        bound = self.tables.constant
        numbers = range(len(self.tables.op_costs))
        for variable in reversed(numbers) if backward else numbers:
            total, later = self._known(variable, backward)
            bound += (1 - sum(share for *_, share in later)) * float(total.min())
            for number, end, share in later:
                pair, messages = self.tables.pairs[number], self._messages[number]
                here = pair.sides[end].least(share * total) - messages[end]
                table = pair.table if end == 0 else pair.table.T
                scaled = (here / pair.scale).astype(np.float32)
                told = (scaled[:, None] + table).min(axis=0)
                messages[1 - end] = pair.scale * told
        return bound

    def _known(self, variable: int, backward: bool) -> tuple[Array, list[tuple[int, int, float]]]:
        """What the ways to cut an operator cost with all messages, and the tables to which it
        passes that, each with its share: more where more blocks have it, for one must not bear what
        is all's."""
        total, later, times = self.tables.op_costs[variable].copy(), [], [0.0, 0.0]
        for number, end in self._around[variable]:
            pair = self.tables.pairs[number]
            total += self._messages[number][end][pair.sides[end].of]
            is_later = (pair.ends[1 - end] < variable) == backward
            times[is_later] += pair.edge.count
            if is_later:
                later.append((number, end, pair.edge.count))
        most = max(times)
        return total, [(number, end, count / most) for number, end, count in later]

    def passed(self) -> list[ByEnd]:
        """What each table passes to its ends after a forward sweep, so that the least entry of what
        remains of it is 0."""
        passed = [
            [message[side.of] for message, side in zip(messages, pair.sides, strict=True)]
            for messages, pair in zip(self._messages, self.tables.pairs, strict=True)
        ]
        for variable in range(len(self.tables.op_costs)):
            total, later = self._known(variable, backward=False)
            for number, end, share in later:
                passed[number][end] = passed[number][end] - share * total
        return passed


def _of_all(tables: CountTables, every: SearchProblem, passed: list[ByEnd]) -> float:
    """The bound of the problem with all blocks, whose tables pass on what that of their block did:
    blocks that repeat are all alike, but for the first and the last."""
    problem, pairs = tables.problem, tables.pairs
    edges = {_key(edge, edge.readers, edge.source): edge for edge in problem.edges}
    by_reader: dict[tuple[int, tuple[int, int] | None], list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        by_reader[id(pair.edge), pair.reader].append(number)
    around: list[dict[tuple[int, int], float]] = [{} for _ in every.variables]
    of = problem.variable_of
    for edge in every.edges:
        readers = Counter((of[op], place) for op, place in edge.readers)
        source = None if edge.source is None else (of[edge.source[0]], edge.source[1])
        folded = edges[_key(edge, tuple(sorted(readers)), source)]
        # Readers that one block stands for share what that passes on.
        for reader, times in readers.items():
            for number in by_reader[id(folded), reader]:
                assert edge.source is not None
                ends = [(edge.source[0], 0, 1.0)]
                ends += [(n, 1, 1 / times) for n, place in edge.readers if (of[n], place) == reader]
                for variable, end, share in ends:
                    key = number, end
                    around[variable][key] = around[variable].get(key, 0.0) + share
    alike: Counter[tuple[int, frozenset[tuple[tuple[int, int], float]]]] = Counter()
    for variable, tables_around in zip(of, around, strict=True):
        alike[variable, frozenset(tables_around.items())] += 1
    bound = tables.constant
    for (variable, passing), count in alike.items():
        cost = tables.op_costs[variable] / problem.variables[variable].count
        for (number, end), part in passing:
            cost = cost + part / pairs[number].edge.count * passed[number][end]
        bound += count * float(cost.min())
    return bound


def _key(
    edge: TensorEdge, readers: tuple[tuple[int, int], ...], source: tuple[int, int] | None
) -> Hashable:
    """What makes values one edge of a problem."""
    own = edge.value.name if source is None else None
    made = source, edge.fixed_axes, readers, edge.returned, edge.differentiable
    return own, made, edge.value.shape, edge.value.dtype

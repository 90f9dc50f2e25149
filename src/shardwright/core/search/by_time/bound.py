"""A lower bound of the objective over all plans, by sequential tree-reweighted message passing.

The sum of the least entries of all tables is at most the least sum of the tables. Messages move
costs between tables without changing any sum, so that the sum of the least entries grows; every
state of the messages proves a bound (Kolmogorov, "Convergent tree-reweighted message passing for
energy minimization", 2006). The tables (`count_tables`) relax the objective in three ways:

- Readers of one value share redistributions. Their cost is at least a weighted mean of what each
  would cost alone; the readers with the largest cost in the known plan are weighted.
- Overlapped communication counts with a fixed λ between 0 and 1 (see `search`).
- Which axes cut a dim is left open, except for their sizes and links.

Messages are computed on the folded problem, in which repeated blocks share variables, and then
applied to the problem with all blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

import numpy as np

from shardwright.core.search.by_time.count_tables import Array, CountTables
from shardwright.core.search.by_time.problem import SearchProblem, TensorEdge
from shardwright.progress import OnShare, ignore_share, track

ROUNDS = 60
"""The largest number of forward and backward sweeps over all variables."""

GAIN = 5e-4
"""Relative growth of the bound in a round below which it counts as converged."""

CostsByEnd = list[Array]
"""The costs that a table passes to the variables at its two ends, for each of their counts."""


def lower_bound(
    tables: CountTables, unfolded: SearchProblem, on_share: OnShare = ignore_share
) -> float:
    """Return seconds that no plan's objective is below.

    Args:
        tables: of the folded problem.
        unfolded: the same problem with a variable for every operator.
        on_share: called with the share of `ROUNDS`.
    """
    messages = _MessagePassing(tables)
    best = messages.run(on_share)
    if tables.problem is unfolded:
        return best
    return _unfolded_bound(tables, unfolded, messages.sent_costs())


class _MessagePassing:
    """Messages from each edge table to the variables at its ends, by layouts of the value."""

    def __init__(self, tables: CountTables) -> None:
        self.tables = tables
        self._messages = [
            [np.zeros(len(side.first_of_layout)) for side in table.table_ends]
            for table in tables.edge_tables
        ]
        self._tables_around: list[list[tuple[int, int]]] = [[] for _ in tables.op_costs]
        for number, table in enumerate(tables.edge_tables):
            for end, variable in enumerate(table.variables):
                self._tables_around[variable].append((number, end))

    def run(self, on_share: OnShare) -> float:
        """Sweep until the bound of the folded problem stops growing, and return it."""
        best = -np.inf
        for _ in track(range(ROUNDS), on_share):
            self._sweep(backward=True)
            bound = self._sweep(backward=False)
            # Each sweep takes as long as the last and gains less.
            if bound <= best + GAIN * abs(best):
                return max(best, bound)
            best = bound
        return best

    def _sweep(self, backward: bool) -> float:
        """Send messages from each variable to later ones, in one direction.

        Returns:
            The bound that the messages prove.
        """
        bound = self.tables.constant
        numbers = range(len(self.tables.op_costs))
        for variable in reversed(numbers) if backward else numbers:
            total, later = self._costs_with_messages(variable, backward)
            # A variable adds the share of its least cost that it does not pass on to later tables.
            bound += (1 - sum(share for *_, share in later)) * float(total.min())
            for number, end, share in later:
                table, messages = self.tables.edge_tables[number], self._messages[number]
                # Without the message that came from this table: it must not return to its sender.
                outgoing = table.table_ends[end].least(share * total) - messages[end]
                bounds = table.bounds if end == 0 else table.bounds.T
                scaled = (outgoing / table.scale).astype(np.float32)
                message = (scaled[:, None] + bounds).min(axis=0)
                messages[1 - end] = table.scale * message
        return bound

    def _costs_with_messages(
        self, variable: int, backward: bool
    ) -> tuple[Array, list[tuple[int, int, float]]]:
        """The costs of a variable plus all messages to it, and the tables to pass them on to.

        Returns:
            The costs, and for each table to a later variable its number, the end, and the share of
            the costs that it gets: in proportion to the blocks that the edge stands for, so that a
            table of a single block does not take the costs of all.
        """
        total, later, num_blocks = self.tables.op_costs[variable].copy(), [], [0.0, 0.0]
        for number, end in self._tables_around[variable]:
            table = self.tables.edge_tables[number]
            total += self._messages[number][end][table.table_ends[end].layout_of]
            is_later = (table.variables[1 - end] < variable) == backward
            num_blocks[is_later] += table.edge.count
            if is_later:
                later.append((number, end, table.edge.count))
        most_blocks = max(num_blocks)
        return total, [(number, end, count / most_blocks) for number, end, count in later]

    def sent_costs(self) -> list[CostsByEnd]:
        """Costs that each table passes to its ends after a forward sweep.

        They are such that the least entry of the remaining table is 0; then only the variables
        count in the bound.
        """
        sent_costs = [
            [
                message[side.layout_of]
                for message, side in zip(messages, table.table_ends, strict=True)
            ]
            for messages, table in zip(self._messages, self.tables.edge_tables, strict=True)
        ]
        for variable in range(len(self.tables.op_costs)):
            total, later = self._costs_with_messages(variable, backward=False)
            for number, end, share in later:
                sent_costs[number][end] = sent_costs[number][end] - share * total
        return sent_costs


def _unfolded_bound(
    tables: CountTables, unfolded: SearchProblem, sent_costs: list[CostsByEnd]
) -> float:
    """The bound of the problem with all blocks, each of which gets the messages of its folded one.

    Any messages prove a bound, and these are good ones, since all blocks but the first and the last
    are equal.
    """
    problem, edge_tables = tables.problem, tables.edge_tables
    edges = {_edge_key(edge, edge.readers, edge.source): edge for edge in problem.edges}
    by_reader: dict[tuple[int, tuple[int, int] | None], list[int]] = defaultdict(list)
    for number, table in enumerate(edge_tables):
        by_reader[id(table.edge), table.reader].append(number)
    tables_around: list[dict[tuple[int, int], float]] = [{} for _ in unfolded.variables]
    variable_of = problem.variable_of
    for edge in unfolded.edges:
        readers = Counter((variable_of[op], input_index) for op, input_index in edge.readers)
        source = None if edge.source is None else (variable_of[edge.source[0]], edge.source[1])
        folded_edge = edges[_edge_key(edge, tuple(sorted(readers)), source)]
        # Readers that share a variable divide the message to it.
        for reader, count in readers.items():
            for number in by_reader[id(folded_edge), reader]:
                assert edge.source is not None
                ends = [(edge.source[0], 0, 1.0)]
                ends += [
                    (n, 1, 1 / count)
                    for n, input_index in edge.readers
                    if (variable_of[n], input_index) == reader
                ]
                for variable, end, share in ends:
                    key = number, end
                    tables_around[variable][key] = tables_around[variable].get(key, 0.0) + share
    num_variables: Counter[tuple[int, frozenset[tuple[tuple[int, int], float]]]] = Counter()
    for variable, its_tables in zip(variable_of, tables_around, strict=True):
        num_variables[variable, frozenset(its_tables.items())] += 1
    bound = tables.constant
    for (variable, table_shares), count in num_variables.items():
        cost = tables.op_costs[variable] / problem.variables[variable].count
        for (number, end), share in table_shares:
            cost = cost + share / edge_tables[number].edge.count * sent_costs[number][end]
        bound += count * float(cost.min())
    return bound


def _edge_key(
    edge: TensorEdge, readers: tuple[tuple[int, int], ...], source: tuple[int, int] | None
) -> Hashable:
    """A key that is equal for values that may share an edge."""
    # Values without a producer are told apart by name: two parameters of one shape are not the
    # same.
    name = edge.value.name if source is None else None
    properties = source, edge.fixed_axes, readers, edge.returned, edge.differentiable
    return name, properties, edge.value.shape, edge.value.dtype

"""A lower bound on the objective of all plans, by sequential tree-reweighted message passing.

The sum of the least entries of all tables is at most the least sum of the tables. Messages move
costs between tables without changing any sum, so that the sum of the least entries grows; every
state of the messages proves a bound (Kolmogorov, "Convergent tree-reweighted message passing for
energy minimization", 2006). The tables (`count_tables`) relax the objective in three ways:

- Consumers of one value share redistributions. Their cost is at least any weighted mean of the
  costs of single consumers; only the consumers with the largest cost in the plan have weight.
- Overlapped communication counts with a fixed λ between 0 and 1 (see `search`).
- Of the axes that shard a dim, only the number, sizes and links are known.

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

MAX_ROUNDS = 60
"""Maximum number of rounds, each a backward and a forward sweep over all variables."""

MIN_GROWTH = 5e-4
"""Relative growth of the bound per round below which the bound counts as converged."""

CostsByEnd = list[Array]
"""The costs that a table passes to the variables at its two ends: one array for each end, with one
entry for each choice of the variable."""


def lower_bound(
    tables: CountTables, unfolded: SearchProblem, on_share: OnShare = ignore_share
) -> float:
    """Return a lower bound in seconds on the search objective, over all shardings.

    Args:
        tables: cost tables of the problem in which repeated blocks share variables.
        unfolded: the problem with one variable per operator.
        on_share: called with the completed fraction of `MAX_ROUNDS`.
    """
    messages = _MessagePassing(tables)
    best = messages.run(on_share)
    if tables.problem is unfolded:
        return best
    return _compute_unfolded_bound(tables, unfolded, messages.sent_costs())


class _MessagePassing:
    """Message passing between variables along the edge tables.

    A message goes from an edge table to the variable at one of its ends. The message has one entry
    for each layout that the value of the edge has at that end.
    """

    def __init__(self, tables: CountTables) -> None:
        self.tables = tables
        # By layout instead of choice: all choices with one layout pay equally for the edge.
        self._messages = [
            [np.zeros(len(end.first_of_layout)) for end in table.table_ends]
            for table in tables.edge_tables
        ]
        self._tables_around: list[list[tuple[int, int]]] = [[] for _ in tables.op_costs]
        for table_index, table in enumerate(tables.edge_tables):
            for end, variable in enumerate(table.variables):
                self._tables_around[variable].append((table_index, end))

    def run(self, on_share: OnShare) -> float:
        """Run sweeps until the bound for the problem with shared variables converges, and return
        the bound."""
        best_bound = -np.inf
        for _ in track(range(MAX_ROUNDS), on_share):
            # The forward sweep comes last, as `sent_costs` needs its messages.
            self._send_all_messages(backward=True)
            bound = self._send_all_messages(backward=False)
            # Each sweep takes as long as the one before and gains less.
            if bound <= best_bound + MIN_GROWTH * abs(best_bound):
                return max(best_bound, bound)
            best_bound = bound
        return best_bound

    def _send_all_messages(self, backward: bool) -> float:
        """Send messages from each variable to later variables in graph order, or in reverse order.

        Returns:
            The lower bound on the objective after these messages.
        """
        bound = self.tables.constant
        variables = range(len(self.tables.op_costs))
        for variable in reversed(variables) if backward else variables:
            costs, later_tables = self._add_received_messages(variable, backward)
            # A variable adds the share of its least cost that it does not pass on to later tables.
            bound += (1 - sum(share for *_, share in later_tables)) * float(costs.min())
            for table_index, end, share in later_tables:
                table, messages = self.tables.edge_tables[table_index], self._messages[table_index]
                # Without the message that this table sent: it must not return to its sender.
                outgoing = table.table_ends[end].least_costs(share * costs) - messages[end]
                bounds = table.bounds if end == 0 else table.bounds.T
                # Tables are in single precision to halve their memory, and so are these sums.
                scaled = (outgoing / table.scale).astype(np.float32)
                message = (scaled[:, None] + bounds).min(axis=0)
                messages[1 - end] = table.scale * message
        return bound

    def _add_received_messages(
        self, variable: int, backward: bool
    ) -> tuple[Array, list[tuple[int, int, float]]]:
        """Return the costs of a variable plus all messages to it, and the fractions to send onward.

        Returns:
            The cost of each choice; and (table index, end at this variable, fraction) for each
            table to a later variable. Fractions are in proportion to the number of blocks that an
            edge represents.
        """
        costs, later_tables, num_blocks = self.tables.op_costs[variable].copy(), [], [0.0, 0.0]
        for table_index, end in self._tables_around[variable]:
            table = self.tables.edge_tables[table_index]
            costs += self._messages[table_index][end][table.table_ends[end].layout_of]
            is_later = (table.variables[1 - end] < variable) == backward
            num_blocks[is_later] += table.edge.count
            if is_later:
                later_tables.append((table_index, end, table.edge.count))
        # The larger of the two directions, as in TRW-S: a variable passes on all of its costs only
        # in the direction with more tables.
        max_blocks = max(num_blocks)
        return costs, [(index, end, count / max_blocks) for index, end, count in later_tables]

    def sent_costs(self) -> list[CostsByEnd]:
        """Return the costs that each table passes to its two ends after a last forward sweep.

        If these costs are subtracted from an edge table, its least entry is 0, so the bound is the
        sum of the least costs of the variables.
        """
        sent_costs = [
            [
                message[end.layout_of]
                for message, end in zip(messages, table.table_ends, strict=True)
            ]
            for messages, table in zip(self._messages, self.tables.edge_tables, strict=True)
        ]
        for variable in range(len(self.tables.op_costs)):
            costs, later_tables = self._add_received_messages(variable, backward=False)
            for table_index, end, share in later_tables:
                sent_costs[table_index][end] = sent_costs[table_index][end] - share * costs
        return sent_costs


def _compute_unfolded_bound(
    tables: CountTables, unfolded: SearchProblem, sent_costs: list[CostsByEnd]
) -> float:
    """Return the bound in seconds of the problem with one variable per operator.

    The costs of its edges are divided between operators as in the problem in which repeated blocks
    share variables, where the division was optimized. Any division gives a valid bound. This bound
    is tight, since all blocks but the first and the last are equal.

    Args:
        tables: tables of the problem with shared variables.
        sent_costs: for each edge table the costs that it adds to the operators at its two ends.
    """
    problem, edge_tables = tables.problem, tables.edge_tables
    # The folded edge of each unfolded one: the two problems share variables, not edge objects.
    edges = {_make_edge_key(edge, edge.consumers, edge.producer): edge for edge in problem.edges}
    tables_of_consumer: dict[tuple[int, tuple[int, int] | None], list[int]] = defaultdict(list)
    for table_index, table in enumerate(edge_tables):
        tables_of_consumer[id(table.edge), table.consumer].append(table_index)
    tables_around: list[dict[tuple[int, int], float]] = [{} for _ in unfolded.variables]
    variable_of = problem.variable_of
    for edge in unfolded.edges:
        consumers = Counter((variable_of[op], input_index) for op, input_index in edge.consumers)
        producer = (
            None if edge.producer is None else (variable_of[edge.producer[0]], edge.producer[1])
        )
        folded_edge = edges[_make_edge_key(edge, tuple(sorted(consumers)), producer)]
        # Consumers that share a variable divide the message to it.
        for consumer, count in consumers.items():
            for table_index in tables_of_consumer[id(folded_edge), consumer]:
                assert edge.producer is not None
                ends = [(edge.producer[0], 0, 1.0)]
                ends += [
                    (n, 1, 1 / count)
                    for n, input_index in edge.consumers
                    if (variable_of[n], input_index) == consumer
                ]
                for variable, end, share in ends:
                    key = table_index, end
                    tables_around[variable][key] = tables_around[variable].get(key, 0.0) + share
    # Variables with equal tables have equal least costs: one minimum for all of them.
    num_variables: Counter[tuple[int, frozenset[tuple[tuple[int, int], float]]]] = Counter()
    for variable, shares_of_tables in zip(variable_of, tables_around, strict=True):
        num_variables[variable, frozenset(shares_of_tables.items())] += 1
    bound = tables.constant
    for (variable, table_shares), count in num_variables.items():
        # Of one operator: the table counts all operators that share the variable.
        cost = tables.op_costs[variable] / problem.variables[variable].count
        for (index, end), share in table_shares:
            cost = cost + share / edge_tables[index].edge.count * sent_costs[index][end]
        bound += count * float(cost.min())
    return bound


def _make_edge_key(
    edge: TensorEdge, consumers: tuple[tuple[int, int], ...], producer: tuple[int, int] | None
) -> Hashable:
    """Return a hashable key of an edge, by which an edge of one problem is looked up in another.

    Args:
        consumers, producer: (variable, tensor index) of each end, numbered as in the problem in
            which repeated blocks share variables.
    """
    # Values without a producer are distinguished by name: two parameters of one shape are not the
    # same value.
    name = edge.value.name if producer is None else None
    properties = producer, edge.fixed_axes, consumers, edge.returned, edge.differentiable
    return name, properties, edge.value.shape, edge.value.dtype

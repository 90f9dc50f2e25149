"""Variable elimination on the operators of one block."""

from __future__ import annotations

from itertools import combinations

import torch
from svg import COLORS, INK, SOFT, Drawing
from torch import nn

from shardwright.core.capture.capture import capture
from shardwright.core.search.by_time.elimination import min_fill_order
from shardwright.core.search.by_time.problem import SearchProblem, search_problem

PANEL = (292.0, 196.0)
FIRST, MIDDLE = 28, 94


class Block(nn.Module):
    """A gated feed-forward layer beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gate, self.up = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def elimination() -> Drawing:
    """Operator after operator is taken out; the tables around it become one of its neighbors'."""
    with torch.device("meta"):
        graph = capture(Block(), (torch.empty(32, 64),))
    problem = search_problem(graph, pinned={})
    scopes = [sorted({end.variable for end in edge.ends()}) for edge in problem.edges]
    order = min_fill_order([2] * len(problem.variables), scopes)
    lines = {pair for scope in scopes for pair in combinations(scope, 2)}
    places = _places(problem)
    columns = 3
    rows = -(-len(order) // columns)
    drawing = Drawing(columns * PANEL[0] + 20, rows * PANEL[1] + 20)
    gone: set[int] = set()
    made: set[tuple[int, int]] = set()
    for number, variable in enumerate(order):
        left = 10 + number % columns * PANEL[0]
        top = 10 + number // columns * PANEL[1]
        around = sorted({other for pair in lines if variable in pair for other in pair})
        neighbors = [other for other in around if other != variable]
        name = problem.variables[variable].op.name
        said = " and ".join(problem.variables[each].op.name for each in neighbors)
        drawing.text(left + 8, top + 18, f"{number + 1}. {name} goes", 12, "start")
        told = f"a table of {said} stays" if said else "the least cost stays"
        drawing.text(left + 8, top + 34, told, 10, "start", SOFT)
        for pair in sorted(lines):
            (x, y), (x2, y2) = ((left + places[each][0], top + places[each][1]) for each in pair)
            if abs(x - x2) > PANEL[0] / 3:
                drawing.arc(x, y, x2, y2, height=-80, dashes=pair in made)
            else:
                drawing.line(x, y, x2, y2, INK, dashes=pair in made)
        for each in range(len(problem.variables)):
            if each not in gone:
                x, y = left + places[each][0], top + places[each][1]
                drawing.circle(x, y, 9, COLORS[1] if each == variable else COLORS[0])
                above = y <= top + MIDDLE
                name = problem.variables[each].op.name
                drawing.text(x, y - 13 if above else y + 20, name, 9)
        gone.add(variable)
        lines = {pair for pair in lines if variable not in pair}
        new = set(combinations(neighbors, 2)) - lines
        made |= new
        lines |= new
    return drawing


def _places(problem: SearchProblem) -> list[tuple[float, float]]:
    """Each operator one column behind those that it reads from."""
    depth = [0] * len(problem.variables)
    for _ in depth:
        for edge in problem.edges:
            if edge.producer is not None:
                for consumer, _ in edge.consumers:
                    depth[consumer] = max(depth[consumer], depth[edge.producer[0]] + 1)
    step = (PANEL[0] - 60) / max(depth)
    beside: dict[int, int] = {}
    places = []
    for column in depth:
        row = beside.get(column, 0)
        beside[column] = row + 1
        places.append((FIRST + column * step, MIDDLE + (row - (depth.count(column) - 1) / 2) * 58))
    return places

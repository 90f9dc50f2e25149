"""What a benchmark returns: tables that know how to be printed and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import rich.table


@dataclass
class Table:
    """Rows of text under named columns.

    Args:
        title: what the rows are, in one line.
        columns: their names. The first is aligned left, the others right.
        missed: goals that the numbers miss, a sentence each; empty if all are met.
    """

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Adds a row.

        Raises:
            ValueError: if there are not as many cells as columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for the {len(self.columns)} columns")
        self.rows.append(tuple(map(str, cells)))

    def rich(self) -> rich.table.Table:
        """For the terminal."""
        table = rich.table.Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a page."""
        alignment = [":--", *["--:"] * (len(self.columns) - 1)]
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, alignment, *self.rows)]
        missed = [f"**Missed:** {goal}" for goal in self.missed]
        return "\n\n".join([f"**{self.title}**", "\n".join(lines), *missed])

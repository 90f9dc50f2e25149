"""Lay out text in columns: break module paths at dots, sentences at spaces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shardwright.errors import printable

MIN_WIDTH, MAX_WIDTH = 80, 160
"""Minimum and maximum width of printed plans, in characters."""

GAP = "  "
"""Separator of columns."""


class PrintableConsole(Console):
    """Console that prints control characters as escape sequences, except for its own colors."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            # Sequences of rich itself, such as those that move the cursor, are control segments.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def text_width() -> int:
    """Return the width of the terminal in characters, clamped to 80..160; 120 if unknown. The
    environment variable `COLUMNS` takes precedence."""
    # Python's fallback of 80 columns would narrow the tables in files and pipes.
    return min(max(get_terminal_size((120, 24)).columns, MIN_WIDTH), MAX_WIDTH)


def render_lines(width: int, *renderables: RenderableType) -> list[str]:
    """Render rich tables and strings at a width in characters, as lines without colors."""
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        for renderable in renderables:
            # Strings have been wrapped already; rich would interpret brackets as markup.
            console.print(renderable, markup=False, soft_wrap=isinstance(renderable, str))
    return [line.rstrip() for line in captured.get().splitlines()]


def wrap_sentence(text: str, width: int, label: str = "") -> list[str]:
    """Wrap a sentence after a label, with later lines indented by the width of the label.

    Args:
        text: the sentence.
        width: maximum length of a line in characters.
        label: prefix of the first line.
    """
    # Not at hyphens, which are inside words such as `row-parallel`.
    return wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
    )


def wrap_lines(lines: Iterable[str], width: int = MIN_WIDTH) -> list[str]:
    """Wrap each line at spaces, with continuation lines indented by four more spaces.

    >>> wrap_lines(["  over tp: k chosen; j 2.1 ms more"], 24)
    ['  over tp: k chosen; j', '      2.1 ms more']
    """
    return [wrapped_line for line in lines for wrapped_line in _wrap_line(line, width)]


def _wrap_line(line: str, width: int) -> list[str]:
    content = line.lstrip()
    indent = " " * (len(line) - len(content))
    # Module paths and shapes stay in one piece, even where they are longer than a line.
    return wrap(
        content,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def split_at_dots(text: str, width: int) -> list[str]:
    """Break a module path into lines of at most `width` characters, at dots where possible.

    >>> split_at_dots("model.layers.{0..79}.self_attn.q_proj", 22)
    ['model.layers.{0..79}.', 'self_attn.q_proj']
    """
    lines = [""]
    # A word ends after dots or commas; the two dots of a range such as `0..79` are inside one.
    for word in re.findall(r"(?:\d+\.\.\d+|[^.,\s])*[.,]*\s*", text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    # A word that is longer than a line is broken anywhere.
    pieces = [line.rstrip()[i : i + width] for line in lines for i in range(0, len(line), width)]
    return [piece for piece in pieces if piece]


def format_columns(header: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[str]:
    """Lay out two columns of text, followed by any number of columns of numbers.

    Columns of numbers are as wide as their cells. If the text columns do not fit into the remaining
    width, the second is narrowed to two fifths of it at least, and the first gets what remains.
    Cells of the first column take at most two lines.

    Args:
        header: the header of each column.
        rows: the cells of each row.
        width: total width in characters.
    """
    rows = [tuple(row) for row in rows]
    sizes = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    text_room = width - sum(size + len(GAP) for size in sizes[2:]) - len(GAP)
    second = min(sizes[1], max(text_room - sizes[0], text_room * 2 // 5))
    # At least 1, as `textwrap.wrap` rejects a width of 0.
    sizes[:2] = max(1, min(sizes[0], text_room - second)), max(1, second)
    lines = []
    for row in (header, *rows):
        indent = " " * (len(row[0]) - len(row[0].lstrip()))
        names = [
            indent + line for line in split_at_dots(row[0].strip(), max(1, sizes[0] - len(indent)))
        ]
        if len(names) > 2:
            # Two characters less, for the space and the ellipsis.
            names = [names[0], f"{names[1][: sizes[0] - 2].rstrip()} …"]
        cells = [
            names,
            wrap(row[1], sizes[1], break_on_hyphens=False),
            *([number] for number in row[2:]),
        ]
        for row_cells in zip_longest(*cells, fillvalue=""):
            padded = [cell.ljust(n) for cell, n in zip(row_cells[:2], sizes[:2], strict=True)]
            padded += [cell.rjust(n) for cell, n in zip(row_cells[2:], sizes[2:], strict=True)]
            lines.append(GAP.join(padded).rstrip())
    return lines

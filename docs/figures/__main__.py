"""Draws the figures of the documentation from the code that they explain:

python docs/figures docs/images
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from elimination import elimination
from layouts import layouts, redistributions
from pipelines import pipelines
from product_rule import rules
from recursion import recursion
from svg import Drawing

FIGURES: tuple[Callable[[], Drawing], ...] = (
    layouts,
    redistributions,
    rules,
    recursion,
    elimination,
    pipelines,
)


def main(folder: Path) -> None:
    for figure in FIGURES:
        (folder / f"{figure.__name__}.svg").write_text(str(figure()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

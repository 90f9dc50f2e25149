"""Draws docstrings, messages and private names at random, for a review of the language.

    python tests/draw_language.py --seed 7
    python tests/draw_language.py --seed 7 --room core/search --docstrings 40
    python tests/draw_language.py --seed 7 --without core/capture

Equal seeds draw the same texts of the same source. A reviewer who has read only the section "The
language" of CONTRIBUTING.md marks each text that she would object to.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence

from source_texts import SourceText, docstrings, messages, private_names


def draw(
    texts: Iterable[SourceText], count: int, seed: int, room: str, without: Sequence[str]
) -> list[SourceText]:
    """Draws up to `count` texts from a room and the rooms below it, but for those in `without`."""
    chosen = [
        each
        for each in texts
        if each.room.startswith(room) and not each.room.startswith(tuple(without))
    ]
    return random.Random(seed).sample(chosen, min(count, len(chosen)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--room", default="", help="a folder of the package, such as core/search")
    parser.add_argument("--without", nargs="*", default=[], help="folders that are left out")
    parser.add_argument("--docstrings", type=int, default=20)
    parser.add_argument("--messages", type=int, default=10)
    parser.add_argument("--names", type=int, default=10)
    options = parser.parse_args()
    number = 0
    for title, texts, count in (
        ("Docstrings", docstrings(), options.docstrings),
        ("Messages", messages(), options.messages),
        ("Private names", private_names(), options.names),
    ):
        print(f"# {title}\n")
        for each in draw(texts, count, options.seed, options.room, options.without):
            number += 1
            print(f"{number}. {each}\n")


if __name__ == "__main__":
    main()

"""The fenced blocks of a Markdown page, in order, each with its language and where it stands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
LANGUAGES = ("python", "console", "sh", "yaml", "text")
_FENCE = re.compile(r"```(.*)")
_NAME = re.compile(r"# ([\w/]+\.(?:py|yaml))\b")


@dataclass(frozen=True)
class Fence:
    """A block between two lines of ```.

    Args:
        line: the number of its first line of text in the page, from 1.
        language: the first word after the opening ```.
        slow: whether `slow` follows, so that it is run with the slow suite.
        text: its lines, each with its end.
    """

    line: int
    language: str
    slow: bool
    text: str

    @property
    def interactive(self) -> bool:
        return ">>>" in self.text

    @property
    def file_name(self) -> str | None:
        """The name in a comment on the first line, which makes the block a file of that name."""
        name = _NAME.match(self.text)
        return name[1] if name else None

    def commands(self) -> list[tuple[str, str]]:
        """Of a console: each command after `$ ` and the output that follows it.

        Raises:
            ValueError: output stands before the first command.
        """
        before, *sessions = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        if before:
            raise ValueError(f"line {self.line}: a console begins with `$ ` and a command")
        ends = (re.search(r"(?<!\\)\n", each) for each in sessions)
        return [
            (each[: end.start()], each[end.end() :])
            for each, end in zip(sessions, ends, strict=True)
            if end
        ]

    def shell_lines(self) -> list[list[str]]:
        """Of a shell block or console: the words of each command, comments left out."""
        if self.language == "console":
            lines = [command.replace("\\\n", "") for command, _ in self.commands()]
        else:
            lines = self.text.replace("\\\n", "").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def fences(text: str) -> tuple[Fence, ...]:
    """The fenced blocks of a page.

    Raises:
        ValueError: a block has no language, an unknown one, or no end, or a line that asks to be
            checked (`>>> `, `$ `) stands outside of all blocks.
    """
    blocks: list[Fence] = []
    opening: tuple[int, str, bool] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        fence = _FENCE.match(line)
        if opening is None and fence:
            opening, inside = (number + 1, *_language(fence[1], number)), []
        elif opening is not None and line.startswith("```"):
            blocks.append(Fence(*opening, "".join(inside)))
            opening = None
        elif opening is not None:
            inside.append(line)
        elif line.lstrip().startswith((">>> ", "$ ")):
            raise ValueError(f"line {number}: {line.strip()!r} stands outside of a fence")
    if opening is not None:
        raise ValueError(f"line {opening[0] - 1}: a fence that does not end")
    return tuple(blocks)


def _language(info: str, number: int) -> tuple[str, bool]:
    language, *options = info.split() or [""]
    if language not in LANGUAGES or options not in ([], ["slow"]):
        valid = ", ".join(LANGUAGES)
        raise ValueError(f"line {number}: ```{info}: valid are {valid}, and `slow` after them")
    return language, bool(options)

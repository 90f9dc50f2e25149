"""What long calls say of how far they are, to whoever asks to be told."""

from __future__ import annotations

from typing import Protocol


class OnProgress(Protocol):
    """Called before each part of a long call."""

    def __call__(self, doing: str, done: int = 0, of: int = 0) -> None:
        """
        Args:
            doing: the part that begins, in words.
            done, of: parts that are done, and all of them; 0 where their number is not known.
        """


def silent(doing: str, done: int = 0, of: int = 0) -> None:
    """For calls that nobody follows."""


def within(on_progress: OnProgress, part: str, done: int = 0, of: int = 0) -> OnProgress:
    """For a call that is itself a part of another: names that part first, and counts as it."""

    count = done, of

    def told(doing: str, done: int = 0, of: int = 0) -> None:
        on_progress(f"{part}: {doing}", *count)

    return told

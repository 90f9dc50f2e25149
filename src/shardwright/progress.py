"""The callback by which long calls report their progress."""

from __future__ import annotations

from typing import Protocol


class OnProgress(Protocol):
    """Called before each phase of a long call."""

    def __call__(self, doing: str, done: int = 0, of: int = 0) -> None:
        """
        Args:
            doing: a short description of the phase that begins.
            done: phases completed so far.
            of: phases in total; 0 if unknown.
        """


def silent(doing: str, done: int = 0, of: int = 0) -> None:
    """Reports nothing."""


def within(on_progress: OnProgress, part: str, done: int = 0, of: int = 0) -> OnProgress:
    """A callback for a call that is one phase of another; reports its phases as `part: doing`."""
    count = done, of

    def report(doing: str, done: int = 0, of: int = 0) -> None:
        on_progress(f"{part}: {doing}", *count)

    return report

"""Moves the flattening of leading dimensions down, past operators that treat rows alike."""

from __future__ import annotations

from torch import fx


def move_flattening_down(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""

"""Skip the generation of Python code for graph modules of `torch.fx` that are never called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx._lazy_graph_module import _use_lazy_graph_module


@contextmanager
def without_generated_code() -> Iterator[None]:
    """Context in which graph modules generate Python code when they are called, not when they
    change.

    Every pass of `torch.export` generates and compiles the code of its graph, a third of the time
    of an export. Capture reads only the graph, not the code.
    """
    with _use_lazy_graph_module(True):
        yield

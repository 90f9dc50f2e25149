"""Progress of a capture, by the layers that its trace has reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from shardwright.progress import OnProgress, ignore_progress

_SECONDS = 1.0
"""Between two reports, where each may be a line."""

_PHASES = 2
"""The trace takes half of the time; what becomes of the traced operators takes the other."""

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def report_layers(twin: nn.Module, on_progress: OnProgress) -> None:
    """Lets the layers of a copy of a model, which is about to be traced, report that they are
    reached. Layers are what stands in a list or a sequence of modules."""
    if on_progress is ignore_progress:
        return
    lists = (module for module in twin.modules() if isinstance(module, _CONTAINERS))
    layers = [layer for each in lists for layer in each.children()]
    reported = 0, time.monotonic()

    def reach(number: int) -> None:
        nonlocal reported
        furthest, last = reported
        if number > furthest and time.monotonic() - last > _SECONDS:
            reported = number, time.monotonic()
            on_progress("capture", number, _PHASES * len(layers))

    for number, layer in enumerate(layers):
        layer.forward = _reporting(layer.forward, number, reach)


def _reporting(
    forward: Callable[..., Any], number: int, reach: Callable[[int], None]
) -> Callable[..., Any]:
    @wraps(forward)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        reach(number)
        return forward(*args, **kwargs)

    return reporting

"""Progress of a capture, measured by the layers that the trace has reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from shardwright.progress import OnProgress, ignore_progress

_SECONDS = 1.0
"""Minimum seconds between two progress reports, each of which may print a line."""

_PHASES = 2
"""Number of phases of a capture, tracing and graph rewriting, which take about equal time."""

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def report_layers(twin: nn.Module, on_progress: OnProgress) -> None:
    """Report progress when the trace of `twin`, a copy of a model, reaches each of its layers.

    Layers are the children of each `nn.ModuleList` and `nn.Sequential`. The `forward` of each layer
    is wrapped in place.
    """
    if on_progress is ignore_progress:
        return
    lists = (module for module in twin.modules() if isinstance(module, _CONTAINERS))
    layers = [layer for each in lists for layer in each.children()]
    reported = 0, time.monotonic()

    def reach(number: int) -> None:
        nonlocal reported
        furthest, last = reported
        # Layers that run again, as in checkpoints, are no progress.
        if number > furthest and time.monotonic() - last > _SECONDS:
            reported = number, time.monotonic()
            on_progress("capture", number, _PHASES * len(layers))

    for number, layer in enumerate(layers):
        layer.forward = _wrap_forward(layer.forward, number, reach)


def _wrap_forward(
    forward: Callable[..., Any], number: int, reach: Callable[[int], None]
) -> Callable[..., Any]:
    @wraps(forward)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        reach(number)
        return forward(*args, **kwargs)

    return reporting

"""Captures a module, called with example arguments, as a `Graph` in canonical form."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.core.capture.autocast import ON_CPU, Autocast
from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.capturable import check_capturable
from shardwright.core.capture.fake_copy import TRACING_LOCK, isolate_capture, warn_of_packing
from shardwright.core.capture.functions_in_full import warn_of_functions_in_full
from shardwright.core.capture.python_capture import capture_python
from shardwright.core.capture.trace import canonical, trace
from shardwright.core.capture.way_out import naming_local_map
from shardwright.core.graph.graph import Graph
from shardwright.errors import CaptureError
from shardwright.progress import OnProgress, ignore_progress

log = logging.getLogger(__name__)


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    compute_dtype: torch.dtype | None = None,
    on_progress: OnProgress = ignore_progress,
    autocast: Autocast = ON_CPU,
) -> Graph:
    """Captures `module(*args, **kwargs)` for the shapes of these arguments.

    The module is neither run nor modified, and no memory is allocated for its weights: parameters
    and arguments may be real tensors or on the meta device. `module.training` is respected. Models
    of `transformers` return no cache of keys and values unless a call asks for one, as under
    gradient checkpointing: a step has no use for it.

    Args:
        compute_dtype: the dtype in which single-precision parameters and inputs are computed.
            Buffers, and the parameters of modules with floating-point buffers, keep theirs; losses
            are computed in single precision.
        on_progress: called with the layers that are reached, once a second.
        autocast: in which the call is made; that which surrounds the capture is no part of it.

    Raises:
        CaptureError: if the forward pass depends on the values of tensors, or uses something that
            `torch.export` cannot capture; the message names the line in the user's code. Also if
            `forward` cannot be called with `args` and `kwargs`, see `check_capturable`.
        StrategyError: if a module whose inputs and outputs are pinned has others than the pin.
    """
    check_capturable(module, args, kwargs)
    warn_of_packing(module, kwargs or {})
    started = time.perf_counter()
    call = CapturedCall.of(module, args, dict(kwargs or {}), autocast)
    with TRACING_LOCK, naming_local_map(module, args, call.kwargs), _restored_generators():
        try:
            with isolate_capture():
                graph = canonical(trace(call, compute_dtype, on_progress=on_progress), call)
        except CaptureError as refusal:
            graph = _with_python(call, compute_dtype, refusal)
    warn_of_functions_in_full(graph)
    return replace(graph, capture_seconds=time.perf_counter() - started)


@contextmanager
def _restored_generators() -> Iterator[None]:
    """A context that leaves the random generators of torch, Python and numpy as they were."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _with_python(
    call: CapturedCall, compute_dtype: torch.dtype | None, refusal: CaptureError
) -> Graph:
    """The graph of a call whose Python `torch.export` cannot leave out: state that `forward`
    changes, caches that it fills, objects that it returns.

    Raises:
        CaptureError: `refusal`, if TorchDynamo cannot capture the call either.
    """
    try:
        return capture_python(call, compute_dtype)
    except Exception as error:
        log.debug("TorchDynamo cannot capture %s: %s", type(call.module).__name__, error)
        first = next(iter(str(error).splitlines()), type(error).__name__)
        refusal.add_note(f"TorchDynamo cannot capture it either: {first}")
    raise refusal

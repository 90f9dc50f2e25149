"""Capture of a module, called with example arguments, as a canonical `Graph`."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.core.capture.autocast import ON_CPU, Autocast
from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.capturable import check_capturable
from shardwright.core.capture.expert_branches import trace_branches
from shardwright.core.capture.experts import hint_of_experts
from shardwright.core.capture.explanation import OWN_ERROR, DataDependentError
from shardwright.core.capture.fake_copy import TRACING_LOCK, isolate_capture, warn_of_packing
from shardwright.core.capture.functions_in_full import warn_of_functions_in_full
from shardwright.core.capture.python_capture import capture_python
from shardwright.core.capture.trace import canonical, fold_operators, trace
from shardwright.core.capture.way_out import naming_local_map
from shardwright.core.graph.graph import Graph
from shardwright.core.torch_internals.dispatch import preserved_dispatch_keys
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
    original: nn.Module | None = None,
) -> Graph:
    """Capture `module(*args, **kwargs)` for the shapes of `args` and `kwargs`.

    The module is neither run nor modified, and no memory is allocated for weights: parameters and
    arguments may be real tensors or on the meta device. `module.training` is respected. Models of
    `transformers` return no key-value cache unless the call asks for one (`use_cache=True`), since
    a training step does not use it.

    Args:
        module: the model.
        args, kwargs: arguments of the call.
        compute_dtype: dtype of the computation with float32 parameters and inputs. Buffers, and the
            parameters of modules with floating-point buffers, keep their dtype; losses are computed
            in float32.
        on_progress: called with the number of traced layers, at most once a second.
        autocast: autocast state of the captured call; regions around `capture` itself do not count.
        original: the module of which `module` is a copy, to which user code may refer.

    Raises:
        CaptureError: if the forward pass depends on the values of tensors, or uses something that
            `torch.export` cannot capture; the message names the line in the user's code. Also if
            `forward` cannot be called with `args` and `kwargs` (`check_capturable`).
        StrategyError: if the pin of a module does not fit its inputs and outputs.
    """
    check_capturable(module, args, kwargs)
    warn_of_packing(module, kwargs or {})
    started = time.perf_counter()
    # Before `isolate_capture`, which enables gradients: the call records the caller's gradient
    # mode.
    call = CapturedCall.of(module, args, dict(kwargs or {}), autocast, original)
    # The trace runs the user's Python, which may draw from any random generator.

    def capture_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        of_arguments = replace(call, args=args, kwargs=kwargs)
        try:
            return _capture_by_export(of_arguments, compute_dtype, on_progress)
        except CaptureError as refusal:
            return _capture_with_dynamo(of_arguments, compute_dtype, refusal)

    naming = naming_local_map(module, args, call.kwargs, capture_call)
    # Frames are freed last, as they tell which module is refused.
    keys = preserved_dispatch_keys(frees_frames=True)
    with TRACING_LOCK, keys, _preserve_random_state(), naming:
        graph = capture_call(call.args, call.kwargs)
    warn_of_functions_in_full(graph)
    return replace(graph, capture_seconds=time.perf_counter() - started)


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore the random generators of torch, Python and numpy on exit."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        # No accelerator is forked: captures run on the CPU.
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _capture_by_export(
    call: CapturedCall, compute_dtype: torch.dtype | None, on_progress: OnProgress
) -> Graph:
    """Capture a call by `torch.export`, also if its Python code branches on the tokens of experts.

    Raises:
        CaptureError: if the call cannot be captured.
    """
    traced = partial(trace, call, compute_dtype, on_progress=on_progress)
    try:
        with isolate_capture():
            return canonical(traced(), call)
    except DataDependentError as refusal:
        hint = hint_of_experts(call.module)
        try:
            if hint:
                with isolate_capture():
                    branches = trace_branches(call, lambda draw: traced(preference=draw))
                    return fold_operators(branches, call)
        except CaptureError as error:
            # An error of PyTorch is of the draws, which the user has not made.
            if isinstance(error.__cause__, CaptureError | None):
                message = str(error).removesuffix(hint).rstrip(".")
                raise CaptureError(f"{message}.{hint}") from error
        raise CaptureError(str(refusal)) from refusal


def _capture_with_dynamo(
    call: CapturedCall, compute_dtype: torch.dtype | None, refusal: CaptureError
) -> Graph:
    """Capture a call by TorchDynamo, which separates operators from Python code that runs in each
    step.

    Required if `forward` changes state, fills caches or returns objects of the user's classes.

    Raises:
        CaptureError: `refusal`, if TorchDynamo cannot capture the call either.
    """
    try:
        return capture_python(call, compute_dtype)
    # TorchDynamo fails with errors of many classes, also of its own internals.
    except Exception as error:
        log.debug("TorchDynamo cannot capture %s: %s", type(call.module).__name__, error)
        # The second line of a CaptureError is its remedy.
        lines = str(error).splitlines()[: 1 + isinstance(error, CaptureError)]
        reason = "; ".join(lines) or type(error).__name__
        # A model that fails by itself fails in TorchDynamo too, which tells nothing new.
        if OWN_ERROR not in str(refusal):
            refusal.add_note(f"TorchDynamo cannot capture it either: {reason}")
    # Outside of `except`, so that TorchDynamo's error is not shown as its context.
    raise refusal

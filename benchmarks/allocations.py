"""What a process has allocated for tensors, as PyTorch's CPU allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile, record_function

MARK = "the second step"


def peak_of_second_step(prepare: Callable[[], Callable[[], object]]) -> int:
    """Bytes at the height of the second call of what `prepare` returns: of all that was allocated
    since `prepare` began and not freed.

    Every allocation of the CPU allocator counts, also those inside operators. What another thread
    frees is never recorded as freed.

    Args:
        prepare: makes all that the step works with, and returns the step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = prepare()
        step()
        gc.collect()
        gc.disable()
        try:
            with record_function(MARK):
                step()
        finally:
            gc.enable()
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    begins = next(event.start_ns() for event in events if event.name() == MARK)
    now = most = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now) if event.start_ns() >= begins else now
    return most

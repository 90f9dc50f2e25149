"""What a process has allocated for tensors, as PyTorch's CPU allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "a later step"
STEPS = 4
"""Steps after the first that are measured; what other threads free is missed by chance, so the
lowest of them comes closest."""


def held() -> int:
    """Bytes of all tensors that Python code of this process can reach, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # A wrapper (DTensor) holds nothing itself; what it wraps is found too. A sparse tensor has
        # no storage: its indices and values do, and PyTorch shows neither to the collector.
        if (
            type(found) in (Tensor, nn.Parameter)
            and found.device.type == "cpu"
            and found.layout == torch.strided
        ):
            storage = found.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def peak_of_later_steps(prepare: Callable[[], Callable[[], object]]) -> int:
    """Bytes at the height of a call of what `prepare` returns, beyond those of tensors that were
    there before: the lowest of some calls after the first.

    Every allocation of the CPU allocator counts, also those inside operators. What another thread
    frees is never recorded as freed.

    Args:
        prepare: makes all that the step works with, and returns the step.
    """
    before = held()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = prepare()
        step()
        start = held() - before
        gc.disable()
        try:
            for _ in range(STEPS):
                with record_function(MARK):
                    step()
        finally:
            gc.enable()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    begins = sorted(event.start_ns() for event in events if event.name() == MARK)
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    ends = (*begins[1:], float("inf"))
    return start + min(
        max(accumulate(change for time, change in changes if begin <= time < end), default=0)
        for begin, end in zip(begins, ends, strict=True)
    )

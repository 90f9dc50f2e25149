"""What a process has allocated for tensors, as PyTorch's CPU allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "the second step"


def held() -> int:
    """Bytes of all tensors that Python code of this process can reach, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # A wrapper (DTensor) holds nothing itself; what it wraps is found too.
        if type(found) in (Tensor, nn.Parameter) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def peak_of_second_step(prepare: Callable[[], Callable[[], object]]) -> int:
    """Bytes at the height of the second call of what `prepare` returns, beyond those of tensors
    that were there before.

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
            with record_function(MARK):
                step()
        finally:
            gc.enable()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    begins = next(event.start_ns() for event in events if event.name() == MARK)
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.start_ns() >= begins
    ]
    rise = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        rise += change
        most = max(most, rise)
    return start + most

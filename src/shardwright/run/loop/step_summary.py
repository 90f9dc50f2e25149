"""Breaks down the time of a step by kind of work, from the events of `torch.profiler`.

On an accelerator, seconds are kernel time; on the CPU, self time of operators, which run one after
another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from shardwright.core.cost.collective_totals import CollectiveTotal
from shardwright.core.cost.time_parts import COMPUTATION, WAITING
from shardwright.core.plan.measured import EXPOSED
from shardwright.core.runtime.accelerator import COLLECTIVE_KERNEL
from shardwright.core.runtime.named_ranges import BUCKET, PASS, SCHEDULE, SEND, WAIT

# Names that PyTorch gives to its own events.
OPTIMIZER = "Optimizer.step#"
BACKWARD_NODE = "autograd::engine::evaluate_function"
COMMUNICATES = ("c10d::", "_c10d_functional::")
ATTENTION = re.compile(r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention)\w*")
MATRIX_PRODUCT = re.compile(r"aten::(\w*mm|\w*conv\w*|linear|matmul|mv|addmv|dot)")

MATRIX, ATTENTION_KIND, OTHER, RECOMPUTED, UPDATE = COMPUTATION
INHERITED_KINDS = (MATRIX, ATTENTION_KIND, RECOMPUTED, UPDATE, EXPOSED)
"""Kinds of work that include all events nested in them."""


@dataclass(frozen=True)
class _EventContext:
    """Properties of an event that follow from the events around it.

    Args:
        kind: the kind of work for which its time counts; empty if not yet known.
        backward: whether it runs in the backward pass.
        waiting: whether it is part of a pipeline schedule, but outside any forward or backward
            pass of a chunk.
        collective: kind and mesh axes of the collective that it belongs to; None outside one.
    """

    kind: str = ""
    backward: bool = False
    waiting: bool = False
    collective: tuple[str, str] | None = None


@dataclass
class StepSummary:
    """The average of the profiled steps.

    Args:
        kinds: seconds by kind of work.
        totals: count, bytes and seconds of collectives, by collective and mesh axes.
    """

    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    totals: dict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
    )

    @classmethod
    def of(cls, events: Iterable[Any], steps: int, accelerated: bool) -> StepSummary:
        """Summarize the `FunctionEvent`s of `steps` steps.

        Args:
            accelerated: whether the computation runs as kernels of an accelerator.
        """
        events, summary = list(events), cls()
        host = [each for each in events if _on_host(each)]
        for event, context in _with_contexts(host):
            own = sum(k.duration for k in event.kernels) if accelerated else _self_time(event)
            summary._add(event, context, own / 1e6 / steps, 1 / steps, accelerated)
        if accelerated:
            kernels = [e for e in events if not (_on_host(e) or e.is_user_annotation)]
            summary.kinds[EXPOSED] = _exposed(kernels) / 1e6 / steps
        return summary

    def _add(
        self, event: Any, context: _EventContext, own: float, weight: float, accelerated: bool
    ) -> None:
        """Add an event with `own` seconds of self time, both per step (`weight` = 1 / steps)."""
        total = weight * event.time_range.elapsed_us() / 1e6
        if context.kind:
            self.kinds[context.kind] += own
        # Pipeline bubbles are the time of a schedule outside its passes. Not on an accelerator: it
        # runs asynchronously, so waiting of the host does not mean that the device is idle.
        if not accelerated and event.name == SCHEDULE:
            self.kinds[WAITING] += total
        if not accelerated and PASS.fullmatch(event.name):
            self.kinds[WAITING] -= total
        if context.collective is not None:
            self.totals[context.collective][2] += own
        send = SEND.fullmatch(event.name)
        if send is not None and context.collective is not None:
            self.totals[context.collective][0] += weight
            self.totals[context.collective][1] += weight * int(send["bytes"])

    @property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """Totals per step, sorted by collective and mesh axes."""
        return tuple(
            CollectiveTotal(*key, *numbers) for key, numbers in sorted(self.totals.items())
        )


def peak_allocated(events: Iterable[Any]) -> int:
    """Peak bytes of CPU tensors, above the bytes allocated before the first event."""
    host = [each for each in events if _on_host(each) and not each.is_async]
    ordered = sorted(host, key=lambda each: each.time_range.start)
    allocated = accumulate((int(each.self_cpu_memory_usage) for each in ordered), initial=0)
    return max(allocated)


def _on_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _with_contexts(host: Sequence[Any]) -> Iterator[tuple[Any, _EventContext]]:
    """Traverse the trees of nested host events, parents first."""
    stack = [
        (event, _EventContext())
        for event in host
        if event.cpu_parent is None and not event.is_async
    ]
    while stack:
        event, outer = stack.pop()
        context = _context(event, outer)
        yield event, context
        stack.extend((child, context) for child in event.cpu_children)


def _context(event: Any, outer: _EventContext) -> _EventContext:
    """The context of an event whose parent has the context `outer`."""
    name = event.name
    match = SEND.fullmatch(name) or WAIT.fullmatch(name)
    if match is not None:
        return _EventContext(EXPOSED, outer.backward, collective=(match["kind"], match["over"]))
    if outer.kind in INHERITED_KINDS:
        return outer
    if name.startswith(OPTIMIZER):
        return replace(outer, kind=UPDATE)
    if name.startswith(BACKWARD_NODE):
        return replace(outer, backward=True)
    if name == SCHEDULE or PASS.fullmatch(name):
        return replace(outer, waiting=name == SCHEDULE)
    if event.is_user_annotation:
        # Named ranges of operators are recorded in the forward pass. Within backward, they are
        # operators recomputed by activation checkpointing.
        recomputed = outer.backward and not BUCKET.fullmatch(name)
        return replace(outer, kind=RECOMPUTED) if recomputed else outer
    return replace(outer, kind=_kind_of_operator(name, outer))


def _kind_of_operator(name: str, outer: _EventContext) -> str:
    if name.startswith(COMMUNICATES):
        # Receives between stages are already counted as waiting.
        return "" if outer.waiting else EXPOSED
    if ATTENTION.fullmatch(name):
        return ATTENTION_KIND
    if MATRIX_PRODUCT.fullmatch(name):
        return MATRIX
    is_operator = "::" in name and not name.startswith(("autograd::", "torch::"))
    return OTHER if is_operator else outer.kind


def _self_time(event: Any) -> float:
    children: float = sum(child.time_range.elapsed_us() for child in event.cpu_children)
    return max(0.0, float(event.time_range.elapsed_us()) - children)


def _exposed(kernels: Sequence[Any]) -> float:
    """Microseconds of communication that no computation overlaps."""
    # A sweep over starts (+1) and ends (-1) of kernels, with the number running of each type.
    changes = []
    for kernel in kernels:
        communicates = COLLECTIVE_KERNEL.search(kernel.name) is not None
        changes.append((kernel.time_range.start, 1, communicates))
        changes.append((kernel.time_range.end, -1, communicates))
    total = last = 0.0
    running = {True: 0, False: 0}
    for time, change, communicates in sorted(changes):
        if running[True] and not running[False]:
            total += time - last
        running[communicates] += change
        last = time
    return total

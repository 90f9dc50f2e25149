"""Break down the time of a step into categories, from the events of `torch.profiler`.

The categories are those of the predicted step time, such as attention or exposed communication.
On an accelerator, seconds are kernel time; on the CPU, self time of operators.
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
from shardwright.core.plan.measured import EXPOSED_COMMUNICATION
from shardwright.core.runtime.accelerator import COLLECTIVE_KERNEL
from shardwright.core.runtime.named_ranges import BUCKET, PASS, SCHEDULE, SEND, WAIT

# Names that PyTorch gives to its own events.
OPTIMIZER_STEP = "Optimizer.step#"
BACKWARD_NODE = "autograd::engine::evaluate_function"
COLLECTIVE_PREFIXES = ("c10d::", "_c10d_functional::")
ATTENTION = re.compile(r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention)\w*")
MATRIX_PRODUCT = re.compile(r"aten::(\w*mm|\w*conv\w*|linear|matmul|mv|addmv|dot)")

MATRIX, ATTENTION_KIND, OTHER, RECOMPUTED, UPDATE = COMPUTATION
# Not `OTHER`: a composite operator without a category of its own may contain matrix products.
INHERITED_KINDS = (MATRIX, ATTENTION_KIND, RECOMPUTED, UPDATE, EXPOSED_COMMUNICATION)
"""Categories that an event's nested events inherit."""


@dataclass(frozen=True)
class _EventContext:
    """Properties that a profiler event inherits from its enclosing events.

    Args:
        category: category to which the event's time is added; empty if undetermined.
        backward: whether the event is in the backward pass.
        waiting: whether the event is in a pipeline schedule, between the passes of its chunks.
        collective: (name, mesh axes) of the collective whose start or wait encloses the event.
    """

    category: str = ""
    backward: bool = False
    waiting: bool = False
    collective: tuple[str, str] | None = None


@dataclass
class StepSummary:
    """Average time and communication of the profiled steps.

    Args:
        seconds_of: seconds per step, by category.
        totals: count, bytes and seconds per step of collectives, by collective and mesh axes.
    """

    seconds_of: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    totals: dict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
    )

    @classmethod
    def of(cls, events: Iterable[Any], steps: int, is_accelerated: bool) -> StepSummary:
        """Summarize the profiler's `FunctionEvent`s of `steps` steps.

        Args:
            is_accelerated: whether computation runs on an accelerator, whose kernel time counts.
        """
        events, summary = list(events), cls()
        host = [each for each in events if _is_host_event(each)]
        for event, context in _iterate_events_with_contexts(host):
            microseconds = (
                sum(kernel.duration for kernel in event.kernels)
                if is_accelerated
                else _compute_self_microseconds(event)
            )
            summary._add_event(
                event, context, microseconds / 1e6 / steps, 1 / steps, is_accelerated
            )
        # Replaces the sum over host events: kernels of communication overlap those of computation.
        if is_accelerated:
            kernels = [e for e in events if not (_is_host_event(e) or e.is_user_annotation)]
            summary.seconds_of[EXPOSED_COMMUNICATION] = (
                _compute_exposed_microseconds(kernels) / 1e6 / steps
            )
        return summary

    def _add_event(
        self,
        event: Any,
        context: _EventContext,
        self_seconds: float,
        weight: float,
        is_accelerated: bool,
    ) -> None:
        """Add the time and the sent bytes of a profiler event to the averages per step.

        Args:
            self_seconds: self time of the event, divided by the number of steps.
            weight: 1 / number of steps, by which counts and bytes are multiplied.
        """
        seconds = weight * event.time_range.elapsed_us() / 1e6
        if context.category:
            self.seconds_of[context.category] += self_seconds
        # Pipeline bubbles are the time of a schedule outside its passes. An accelerator runs
        # asynchronously, so there a waiting host does not mean an idle device.
        if not is_accelerated and event.name == SCHEDULE:
            self.seconds_of[WAITING] += seconds
        if not is_accelerated and PASS.fullmatch(event.name):
            self.seconds_of[WAITING] -= seconds
        if context.collective is not None:
            self.totals[context.collective][2] += self_seconds
        # Only a send has bytes and is counted; a wait adds its time to the same collective.
        send = SEND.fullmatch(event.name)
        if send is not None and context.collective is not None:
            self.totals[context.collective][0] += weight
            self.totals[context.collective][1] += weight * int(send["bytes"])

    @property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """Totals of collectives per step, sorted by collective and mesh axes."""
        return tuple(
            CollectiveTotal(*key, *numbers) for key, numbers in sorted(self.totals.items())
        )


def peak_allocated(events: Iterable[Any]) -> int:
    """Return the peak bytes of CPU tensors, not counting tensors allocated before the first
    event."""
    # Without events that end on another thread, to which no memory is attributed.
    host = [each for each in events if _is_host_event(each) and not each.is_async]
    ordered = sorted(host, key=lambda each: each.time_range.start)
    # Each event has the bytes that it has allocated minus those that it has freed.
    allocated = accumulate((int(each.self_cpu_memory_usage) for each in ordered), initial=0)
    return max(allocated)


def _is_host_event(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _iterate_events_with_contexts(
    host_events: Sequence[Any],
) -> Iterator[tuple[Any, _EventContext]]:
    """Yield (profiler event of the host, its context), enclosing events before nested ones."""
    stack = [
        (event, _EventContext())
        for event in host_events
        # PyTorch nests only events that begin and end on one thread; the others would count twice.
        if event.cpu_parent is None and not event.is_async
    ]
    while stack:
        event, parent = stack.pop()
        context = _derive_event_context(event, parent)
        yield event, context
        stack.extend((child, context) for child in event.cpu_children)


def _derive_event_context(event: Any, parent: _EventContext) -> _EventContext:
    """Return the context of an event; `parent` is the context of the enclosing event."""
    name = event.name
    # Before categories are inherited: communication during recomputation is communication.
    match = SEND.fullmatch(name) or WAIT.fullmatch(name)
    if match is not None:
        return _EventContext(
            EXPOSED_COMMUNICATION, parent.backward, collective=(match["kind"], match["over"])
        )
    if parent.category in INHERITED_KINDS:
        return parent
    if name.startswith(OPTIMIZER_STEP):
        return replace(parent, category=UPDATE)
    if name.startswith(BACKWARD_NODE):
        return replace(parent, backward=True)
    if name == SCHEDULE or PASS.fullmatch(name):
        return replace(parent, waiting=name == SCHEDULE)
    if event.is_user_annotation:
        # Named ranges of operators are recorded in the forward pass. Within backward, they are
        # operators recomputed by activation checkpointing.
        recomputed = parent.backward and not BUCKET.fullmatch(name)
        return replace(parent, category=RECOMPUTED) if recomputed else parent
    return replace(parent, category=_choose_event_category(name, parent))


def _choose_event_category(name: str, parent: _EventContext) -> str:
    if name.startswith(COLLECTIVE_PREFIXES):
        # Receives between stages are already counted as waiting.
        return "" if parent.waiting else EXPOSED_COMMUNICATION
    if ATTENTION.fullmatch(name):
        return ATTENTION_KIND
    if MATRIX_PRODUCT.fullmatch(name):
        return MATRIX
    # Events of autograd and TorchScript only enclose operators.
    is_operator = "::" in name and not name.startswith(("autograd::", "torch::"))
    return OTHER if is_operator else parent.category


def _compute_self_microseconds(event: Any) -> float:
    children: float = sum(child.time_range.elapsed_us() for child in event.cpu_children)
    return max(0.0, float(event.time_range.elapsed_us()) - children)


def _compute_exposed_microseconds(kernels: Sequence[Any]) -> float:
    """Return the exposed communication of `kernels`: microseconds not overlapped by computation."""
    # Sweeps over starts (+1) and ends (-1) of kernels, counting running communication kernels
    # (True) and computation kernels (False).
    changes = []
    for kernel in kernels:
        communicates = COLLECTIVE_KERNEL.search(kernel.name) is not None
        changes.append((kernel.time_range.start, 1, communicates))
        changes.append((kernel.time_range.end, -1, communicates))
    total = last = 0.0
    running = {True: 0, False: 0}
    # At equal times, ends (-1) sort before starts (1), so that adjacent kernels do not overlap.
    for time, change, communicates in sorted(changes):
        if running[True] and not running[False]:
            total += time - last
        running[communicates] += change
        last = time
    return total

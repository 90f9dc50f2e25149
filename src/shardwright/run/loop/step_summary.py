"""From the events of a profiler to what took the time of a step.

On an accelerator the seconds are those of kernels; on the CPU those of the operators themselves,
which end before the next begins.
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

OPTIMIZER = "Optimizer.step#"
BACKWARD_NODE = "autograd::engine::evaluate_function"
COMMUNICATES = ("c10d::", "_c10d_functional::")
ATTENTION = re.compile(r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention)\w*")
MATRIX_PRODUCT = re.compile(r"aten::(\w*mm|\w*conv\w*|linear|matmul|mv|addmv|dot)")

MATRICES, ATTENDS, OTHER, AGAIN, UPDATE = COMPUTATION
WHOLE = (MATRICES, ATTENDS, AGAIN, UPDATE, EXPOSED)
"""Kinds of which all is that happens in them."""


@dataclass(frozen=True)
class _Within:
    """In what an event happens.

    Args:
        kind: what it counts to; empty while that is not known.
        backward: whether autograd has called it.
        waiting: whether it is in a pipeline's schedule, but in no pass of a chunk.
        sent: kind and axes of the collective that it is part of.
    """

    kind: str = ""
    backward: bool = False
    waiting: bool = False
    sent: tuple[str, str] | None = None


@dataclass
class StepSummary:
    """An average step.

    Args:
        kinds: seconds by what took them.
        sent: by kind and axes how many collectives, their bytes and their seconds.
    """

    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
    )

    @classmethod
    def of(cls, events: Iterable[Any], steps: int, accelerated: bool) -> StepSummary:
        """Of the `FunctionEvent`s of so many steps."""
        events, summary = list(events), cls()
        host = [each for each in events if _on_host(each)]
        for event, within in _nested(host):
            own = sum(k.duration for k in event.kernels) if accelerated else _self_time(event)
            summary._add(event, within, own / 1e6 / steps, 1 / steps, accelerated)
        if accelerated:
            kernels = [e for e in events if not (_on_host(e) or e.is_user_annotation)]
            summary.kinds[EXPOSED] = _exposed(kernels) / 1e6 / steps
        return summary

    def _add(
        self, event: Any, within: _Within, own: float, share: float, accelerated: bool
    ) -> None:
        whole = share * event.time_range.elapsed_us() / 1e6
        if within.kind:
            self.kinds[within.kind] += own
        # What the host waits for says nothing of an accelerator that is behind it.
        if not accelerated and event.name == SCHEDULE:
            self.kinds[WAITING] += whole
        if not accelerated and PASS.fullmatch(event.name):
            self.kinds[WAITING] -= whole
        if within.sent is not None:
            self.sent[within.sent][2] += own
        started = SEND.fullmatch(event.name)
        if started is not None and within.sent is not None:
            self.sent[within.sent][0] += share
            self.sent[within.sent][1] += share * int(started["bytes"])

    @property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        return tuple(CollectiveTotal(*key, *numbers) for key, numbers in sorted(self.sent.items()))


def most_allocated(events: Iterable[Any]) -> int:
    """The most bytes that the CPU's tensors took at once beyond what there was before."""
    host = [each for each in events if _on_host(each) and not each.is_async]
    ordered = sorted(host, key=lambda each: each.time_range.start)
    taken = accumulate((int(each.self_cpu_memory_usage) for each in ordered), initial=0)
    return max(taken)


def _on_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _nested(host: Sequence[Any]) -> Iterator[tuple[Any, _Within]]:
    """Each event with what it happens in."""
    left = [(event, _Within()) for event in host if event.cpu_parent is None and not event.is_async]
    while left:
        event, outer = left.pop()
        within = _within(event, outer)
        yield event, within
        left.extend((child, within) for child in event.cpu_children)


def _within(event: Any, outer: _Within) -> _Within:
    name = event.name
    collective = SEND.fullmatch(name) or WAIT.fullmatch(name)
    if collective is not None:
        return _Within(EXPOSED, outer.backward, sent=(collective["kind"], collective["over"]))
    if outer.kind in WHOLE:
        return outer
    if name.startswith(OPTIMIZER):
        return replace(outer, kind=UPDATE)
    if name.startswith(BACKWARD_NODE):
        return replace(outer, backward=True)
    if name == SCHEDULE or PASS.fullmatch(name):
        return replace(outer, waiting=name == SCHEDULE)
    if event.is_user_annotation:
        # The range of an operator: autograd calls those only that are computed again.
        again = outer.backward and not BUCKET.fullmatch(name)
        return replace(outer, kind=AGAIN) if again else outer
    return replace(outer, kind=_kind_of_operator(name, outer))


def _kind_of_operator(name: str, outer: _Within) -> str:
    if name.startswith(COMMUNICATES):
        return "" if outer.waiting else EXPOSED
    if ATTENTION.fullmatch(name):
        return ATTENDS
    if MATRIX_PRODUCT.fullmatch(name):
        return MATRICES
    operator = "::" in name and not name.startswith(("autograd::", "torch::"))
    return OTHER if operator else outer.kind


def _self_time(event: Any) -> float:
    inside: float = sum(child.time_range.elapsed_us() for child in event.cpu_children)
    return max(0.0, float(event.time_range.elapsed_us()) - inside)


def _exposed(kernels: Sequence[Any]) -> float:
    """Microseconds of communication that no computation overlaps."""
    changes = []
    for kernel in kernels:
        sends = COLLECTIVE_KERNEL.search(kernel.name) is not None
        changes.append((kernel.time_range.start, 1, sends))
        changes.append((kernel.time_range.end, -1, sends))
    total = last = 0.0
    running = {True: 0, False: 0}
    for moment, change, sends in sorted(changes):
        if running[True] and not running[False]:
            total += moment - last
        running[sends] += change
        last = moment
    return total

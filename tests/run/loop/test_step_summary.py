"""Events of a profiler as seconds by kind of work, and as collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.core.cost.collective_totals import CollectiveTotal
from shardwright.run.loop.step_summary import StepSummary, peak_allocated

RANGES = ("send ", "wait ", "bucket ", "schedule", "forward of", "layers.")


def event(name: str, start: int, end: int, *inside: Any, kernels: tuple[int, ...] = ()) -> Any:
    """An event of the host, with what happens in it; times in microseconds."""
    made = SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        cpu_children=list(inside),
        cpu_parent=None,
        kernels=[SimpleNamespace(duration=each) for each in kernels],
        device_type=SimpleNamespace(name="CPU"),
        is_async=False,
        is_user_annotation=name.startswith(RANGES),
        self_cpu_memory_usage=0,
    )
    for each in inside:
        each.cpu_parent = made
    return made


def kernel(name: str, start: int, end: int) -> Any:
    made = event(name, start, end)
    made.device_type.name = "CUDA"
    return made


def every(*roots: Any) -> list[Any]:
    """The events with all that is in them, as a profiler lists them."""
    return [each for root in roots for each in (root, *every(*root.cpu_children))]


def summary(*roots: Any, steps: int = 1, accelerated: bool = False) -> StepSummary:
    return StepSummary.of(every(*roots), steps, accelerated)


def microseconds(found: StepSummary) -> dict[str, float]:
    return {kind: round(1e6 * each, 6) for kind, each in found.seconds_of.items() if each}


def test_operators_count_to_their_kinds_and_ranges_alone_to_none() -> None:
    product = event("aten::linear", 10, 40, event("aten::addmm", 12, 38))
    attention = event("aten::scaled_dot_product_attention", 50, 90, event("aten::bmm", 55, 85))
    forward = event("layers.0.mlp", 0, 100, product, attention, event("aten::gelu", 91, 95))
    update = event("Optimizer.step#AdamW.step", 200, 260, event("aten::add_", 210, 220))
    assert microseconds(summary(forward, update)) == {
        "matrix products": 30,
        "attention": 40,
        "other operators": 4,
        "optimizer": 60,
    }


def test_operators_whose_ranges_autograd_enters_are_recomputed() -> None:
    again = event("layers.0.mlp", 110, 150, event("aten::mm", 111, 149))
    bucket = event("bucket 0", 150, 160, event("send all_reduce over dp, 8 B", 151, 159))
    node = "autograd::engine::evaluate_function: CheckpointBackward"
    backward = event(node, 100, 200, again, bucket, event("aten::mm", 170, 190))
    found = summary(backward)
    assert microseconds(found) == {"recomputation": 40, "communication": 8, "matrix products": 20}


def test_collectives_have_counts_bytes_and_what_a_rank_waits_for_them() -> None:
    inner = event("aten::cat", 2, 6)
    found = summary(
        event("send all_gather over tp0·tp1, 100 B", 0, 10, inner),
        event("wait for all_gather over tp0·tp1", 20, 50),
        event("send all_gather over tp0·tp1, 300 B", 60, 70),
        steps=2,
    )
    (total,) = found.collectives
    assert total == CollectiveTotal("all_gather", "tp0·tp1", 1, 200, pytest.approx(25e-6))
    assert microseconds(found) == {"communication": 25}


def test_bubbles_are_what_no_chunk_of_a_schedule_works_in() -> None:
    passes = [
        event(f"forward of chunk 1, micro-batch {n}", 20 + 30 * n, 40 + 30 * n) for n in range(2)
    ]
    schedule = event("schedule", 0, 100, event("c10d::recv_", 0, 20), *passes)
    assert microseconds(summary(schedule)) == {"pipeline bubbles": 60}


def test_of_an_accelerator_kernels_count_and_communication_where_it_is_alone() -> None:
    product = event("aten::mm", 0, 1, kernels=(400, 100))
    sent = event(
        "send all_reduce over dp, 64 B", 1, 2, event("c10d::allreduce_", 1, 2, kernels=(300,))
    )
    waits = event("schedule", 0, 5000)
    kernels = [kernel("sm90_gemm", 0, 500), kernel("ncclDevKernel_AllReduce_Sum", 400, 700)]
    found = summary(product, sent, waits, *kernels, accelerated=True)
    assert microseconds(found) == {"matrix products": 500, "communication": 200}
    assert found.collectives[0].seconds == pytest.approx(300e-6)


def test_the_most_that_was_allocated_is_the_height_of_what_came_and_went() -> None:
    sizes = [(5, 100), (7, -60), (6, 50), (9, 10)]
    events = [event("aten::empty", start, start + 1) for start, _ in sizes]
    for each, (_, size) in zip(events, sizes, strict=True):
        each.self_cpu_memory_usage = size
    assert peak_allocated(events) == 150
    assert peak_allocated([]) == 0

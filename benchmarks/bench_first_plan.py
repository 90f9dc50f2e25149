"""The first plan, everything open

LLaMA 3 of `transformers` on the meta device, bfloat16, sequence 8192, planned for H100 with
`stages="auto", micro_batches="auto", schedule="auto"` under a memory limit. By default a few layers
under a limit at which memory is as scarce as for the whole model. *CPU*: seconds of one core for
the whole call, capture included. *Memory*: peak of the planning process. *Step*: predicted seconds
of a step. Goals: 180 s for 70B on 64 devices, 400 s for 405B on 1,024.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds, in_fresh_process
from shardwright.core.cost.memory import bytes_text

VOCABULARY, LENGTH, KEY_HEADS = 128256, 8192, 8


@dataclass(frozen=True)
class Case:
    """A model on so many devices.

    Args:
        hidden, inner, heads: sizes of a layer.
        batch: sequences of a step.
        limit: memory limit per device.
        goal: CPU seconds; None for no goal.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    devices: int
    batch: int
    limit: str
    goal: float | None = None


@dataclass(frozen=True)
class Measured:
    """One call of `plan`."""

    cpu: float
    memory: int
    step: float
    plan: str


SMALL = Case("4 layers of 70B", 4, 8192, 28672, 64, 64, 32, "10GiB")
CASES = (
    SMALL,
    Case("70B", 80, 8192, 28672, 64, 64, 128, "72GiB", goal=180.0),
    Case("405B", 126, 16384, 53248, 128, 1024, 1024, "72GiB", goal=400.0),
)


def measure(case: Case) -> Measured:
    """Plans in this process, which has planned nothing before."""
    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=KEY_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with torch.device("meta"):
        net = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(case.batch, LENGTH, dtype=torch.long)
    found: list[sw.Plan] = []

    def planned() -> None:
        found.append(
            sw.plan(
                net,
                (),
                {"input_ids": ids, "labels": ids.clone()},
                devices=case.devices,
                cluster="h100",
                memory_limit=case.limit,
                compute_dtype="bfloat16",
                stages="auto",
                micro_batches="auto",
                schedule="auto",
            )
        )

    cpu = cpu_seconds(planned)
    (plan,) = found
    assert plan.step is not None
    pipeline = plan.pipeline
    parts = [f"{pipeline.stages} stages", f"{pipeline.micro_batches} micro-batches"]
    words = ", ".join([*parts, pipeline.schedule] if pipeline.stages > 1 else parts)
    memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(cpu, memory, plan.step.seconds, words)


def run(size: Size) -> list[Table]:
    columns = ("model", "devices", "CPU s", "memory", "step s", "plan")
    table = Table("Everything open, under a memory limit", columns)
    for case in size.of((SMALL,), full=CASES):
        found = in_fresh_process(partial(measure, case))
        numbers = f"{found.cpu:.0f}", bytes_text(found.memory), f"{found.step:.4g}", found.plan
        table.add(case.name, case.devices, *numbers)
        if case.goal is not None and found.cpu > case.goal:
            table.missed.append(f"{case.name} takes {found.cpu:.0f} s, more than {case.goal:.0f}")
    return [table]

"""Models in their full size

What is trained at scale, unmodified and in its real size, planned for H100 without devices:
bfloat16, AdamW, parameters and optimizer state sharded where they are used whole, as much computed
again as memory requires. *Batch*: sequences (else samples) of a step × tokens of each.
*Seconds*: CPU time to capture and to plan. *Best of grid*: the fastest that fits of data × context
× tensor × expert × stages, where experts share the devices of data; all with the same batch,
micro-batches and memory, sharded alike, with as much computed again as they need. Of the U-Net and
the recommender it is data parallel alone. Goals: each plan fits, and is as fast as the best of its
grid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from benchmarks.full_size import (
    deepseek,
    denoiser,
    gpt_oss,
    language,
    llama_3,
    mixtral,
    olmoe,
    qwen_3,
    qwen_3_32b,
    recommender,
)
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import in_fork
from shardwright.core.api import plan
from shardwright.core.capture.annotations import module_tags
from shardwright.core.capture.capture import capture
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.memory import bytes_text
from shardwright.core.graph.graph import Graph
from shardwright.core.plan import Plan
from shardwright.errors import MemoryLimitError
from shardwright.models.expert_sharding import (
    expert_stages,
    paths_of_blocks,
    pin_expert,
    tensor_parallel_dimensions,
)
from shardwright.tools.compare.alternatives import TOLERANCE, step_seconds_bound

CLUSTER = "h100"
Parts = tuple[int, int, int, int, int]
"""Data, context, tensor and expert parallel, and stages."""

TENSOR, EXPERTS = (1, 2, 4, 8), (1, 8, 64)


@dataclass(frozen=True)
class Case:
    """A model on so many devices.

    Args:
        make: the model and the arguments of a call, from the size of a micro-batch.
        length: tokens of a sequence; None where there are none.
    """

    name: str
    make: Callable[[int], tuple[nn.Module, Any]]
    devices: int
    batch: int
    length: int | None
    micro_batches: int = 1


def _language(name: str, make: Callable[[], nn.Module], *sizes: int) -> Case:
    devices, batch, length, *rest = sizes
    return Case(name, partial(language, make, length=length), devices, batch, length, *rest)


CASES = (
    _language("Llama-3 8B", partial(llama_3, "8B"), 64, 64, 8192),
    _language("Llama-3 8B", partial(llama_3, "8B"), 64, 1, 2**20),
    _language("Llama-3 70B", partial(llama_3, "70B"), 256, 256, 8192, 4),
    _language("Llama-3 405B", partial(llama_3, "405B"), 512, 512, 8192, 8),
    _language("Qwen3-32B", qwen_3_32b, 64, 128, 8192, 2),
    _language("Mixtral-8x7B", mixtral, 64, 256, 4096, 4),
    _language("Qwen3-30B-A3B", qwen_3, 64, 256, 4096, 4),
    _language("OLMoE-1B-7B", olmoe, 64, 512, 4096, 4),
    _language("GPT-OSS 120B", gpt_oss, 128, 256, 4096, 4),
    _language("DeepSeek-V3", deepseek, 512, 1024, 4096, 8),
    Case("SDXL U-Net", denoiser, 64, 512, None),
    Case("DLRM", recommender, 64, 65536, None),
)
FEW = (0, 7, 11)
"""Those that are planned at the default size."""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table(
        "Planned for H100",
        (
            *("model", "parameters", "devices", "batch", "seconds", "step, s", "memory"),
            *("best of grid, s", "as"),
        ),
    )
    for case in size.of(tuple(CASES[number] for number in FEW), full=CASES):
        in_fork(partial(measured, case)).add_to(table, case)
    return [table]


@dataclass(frozen=True)
class Found:
    """What was planned, and what by hand.

    Args:
        parameters: their number.
        capture, plan: seconds of CPU.
        step: seconds; infinite if nothing fits.
        grid_seconds: seconds of the best of the grid; infinite if nothing of it fits.
    """

    parameters: int
    capture: float
    plan: float
    step: float
    memory: int
    grid_seconds: float
    parts: Parts | None

    def add_to(self, table: Table, case: Case) -> None:
        """A row, and what it misses."""
        batch = f"{case.batch}" if case.length is None else f"{case.batch} × {case.length}"
        table.add(
            *(case.name, f"{self.parameters / 1e9:.1f} B", case.devices, batch),
            *(f"{self.capture:.0f} + {self.plan:.0f}", f"{self.step:.3g}", bytes_text(self.memory)),
            f"{self.grid_seconds:.3g}" if self.grid_seconds < inf else "–",
            "–" if self.parts is None else "·".join(map(str, self.parts)),
        )
        if self.step == inf:
            table.missed.append(f"{case.name}, {batch}: no plan fits")
        elif self.step > (1 + TOLERANCE) * self.grid_seconds:
            table.missed.append(
                f"{case.name}, {batch}: {self.step / self.grid_seconds:.2f} of its grid"
            )


def measured(case: Case) -> Found:
    """A case, planned and by hand."""
    net, arguments = case.make(case.batch // case.micro_batches)
    started = time.process_time()
    graph = capture(net, (), arguments, compute_dtype=torch.bfloat16)
    captured = time.process_time()
    step, memory = _planned(graph, case, stages="auto" if case.micro_batches > 1 else 1)
    planned = time.process_time()
    grid_seconds, parts = _best_of_grid(net, graph, case)
    return Found(
        sum(value.numel for value in graph.parameters),
        captured - started,
        planned - captured,
        step,
        memory,
        grid_seconds,
        parts,
    )


def _planned(graph: Graph, case: Case, **options: Any) -> tuple[float, int]:
    """Seconds of a step and bytes of a device; infinitely many seconds where nothing fits."""
    try:
        found: Plan = plan(
            graph,
            devices=case.devices,
            cluster=CLUSTER,
            micro_batches=case.micro_batches,
            hsdp=True,
            recompute="auto",
            **options,
        )
    except MemoryLimitError:
        return inf, 0
    assert found.step_time is not None
    return found.step_time, found.memory.peak


def _best_of_grid(net: nn.Module, graph: Graph, case: Case) -> tuple[float, Parts | None]:
    """None is planned that cannot be faster than the best so far."""
    cluster = load_cluster(CLUSTER)

    def bound(parts: Parts) -> float:
        data, context, tensor, _, stages = parts
        return step_seconds_bound(
            graph, cluster, (data * context, tensor, stages), case.micro_batches
        )

    best: tuple[float, Parts | None] = inf, None
    if not list(tensor_parallel_dimensions(net)):
        step, _ = _planned(graph, case, mode="data_parallel")
        return step, (case.devices, 1, 1, 1, 1)
    for least, parts in sorted((bound(parts), parts) for parts in _grid(net, case)):
        if least >= best[0]:
            break
        data, context, tensor, experts, stages = parts
        pin_expert(
            net,
            data_parallel=data,
            context_parallel=context,
            model_parallel=tensor,
            expert_parallel=experts,
            seq_parallel=tensor > 1,
        )
        pinned = replace(graph, module_tags=module_tags(net))
        of_module = expert_stages(net, stages) if stages > 1 else None
        step, _ = _planned(pinned, case, mode="sharding_propagation", stage_config=of_module)
        best = min(best, (step, parts), key=lambda found: found[0])
    return best


def _grid(net: nn.Module, case: Case) -> Iterator[Parts]:
    """What divides the devices and what is cut; context parallel only where data are too few."""
    sizes = [size for _, _, size in tensor_parallel_dimensions(net)]
    count = next((e.shape[0] for n, e in net.named_parameters() if n.endswith("gate_up_proj")), 1)
    blocks, rows = len(list(paths_of_blocks(net))), case.batch // case.micro_batches
    for stages in range(1, min(case.micro_batches, blocks) + 1):
        for tensor in TENSOR:
            if case.devices % (stages * tensor) or any(n % tensor for n in sizes):
                continue
            left = case.devices // stages // tensor
            data = min(left, rows)
            for experts in EXPERTS:
                if count % experts == data % experts == left % data == 0:
                    yield data, left // data, tensor, experts, stages

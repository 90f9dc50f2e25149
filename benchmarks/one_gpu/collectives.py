"""The program's collectives over the device's own backend, in a process group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw
from benchmarks.one_gpu.rates import seconds
from benchmarks.one_gpu.sizes import Sizes
from benchmarks.table import Table
from shardwright.core.agreement.collective import check_description, take_values_of_rank_0
from shardwright.core.layout.layout import Layout
from shardwright.core.misuse.batch_guard import BatchGuard
from shardwright.core.runtime import collectives
from shardwright.core.runtime.accelerator import HOST_BACKEND, backend_of
from shardwright.core.runtime.devices import Devices, Group

DTYPES = (torch.bfloat16, torch.float32)


@contextmanager
def group_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, over the backend of `device`."""
    own = None if device.type == "cpu" else device
    dist.init_process_group(
        backend_of(device), store=dist.HashStore(), rank=0, world_size=1, device_id=own
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()


def own_collectives(device: torch.device, sizes: Sizes) -> Table:
    """Runs each, looks whether it gives what it was given, and takes its time."""
    table = Table(
        f"{backend_of(device)}, one rank, {sizes.message:,} elements",
        ("collective", "ms", "GB/s", "result"),
    )
    with group_of_one(device) as world:
        group = Group((0,), str(world.group_name), 1, (0,))
        for dtype in DTYPES:
            x = torch.randn(8, sizes.message // 8, device=device).to(dtype)
            for name, call in _calls(group).items():
                taken = seconds(partial(call, x), device, sizes)
                result = "exact" if torch.equal(call(x), x) else "wrong"
                kind = str(dtype).removeprefix("torch.")
                rate = f"{x.nbytes / taken / 1e9:.4g}"
                table.add(f"{name}, {kind}", f"{1e3 * taken:.3f}", rate, result)
                if result != "exact":
                    table.missed.append(f"{name}, {kind}: the result is wrong")
        for name, check in _checks(device).items():
            check()
            table.add(name, "", "", "runs")
    return table


def _calls(group: Group) -> dict[str, Callable[[Tensor], Tensor]]:
    all_reduce = collectives.all_reduce(group)

    return {
        "all-reduce": all_reduce,
        "all-gather": collectives.all_gather(0, group),
        "reduce-scatter": collectives.reduce_scatter(0, group),
        "all-to-all": collectives.all_to_all(0, 1, group),
        "permute": partial(collectives.exchange, send=[1], receive=[1], group=group),
        "all-reduce, compiled": torch.compile(all_reduce, fullgraph=True),
    }


def _checks(device: torch.device) -> dict[str, Callable[[], None]]:
    """What ranks compare with each other, and how."""
    values = {"weight": torch.randn(1000, device=device), "on the host": torch.randn(10)}
    net, batch = nn.Linear(8, 4), torch.randn(16, 8)
    graph = sw.plan(net, (batch,), devices=1).graph
    assert graph is not None
    # Two stages, of which the other is not looked for.
    devices = Devices(Layout((), ()), device, None, lambda function: function(()), stages=2)

    def guard() -> None:
        guard = BatchGuard(devices, graph, {})
        for _ in range(5):
            guard.begin("a call", [batch.to(device)], [0], False)

    def objects() -> None:
        group, every = dist.new_group(backend=HOST_BACKEND), [None]
        dist.all_gather_object(every, {"step": 1}, group=group)
        assert every == [{"step": 1}]

    return {
        "comparison of models and plans": lambda: check_description(["a line"], device),
        "rank 0's parameters for all": lambda: _expect(take_values_of_rank_0(values, device)),
        "comparison of batches, on a stream beside the program's": guard,
        "objects over the host's backend, for checkpoints": objects,
    }


def _expect(differing: list[str]) -> None:
    assert not differing

"""Prints what the checks of `core/misuse` cost that one process can measure, in microseconds of its
thread: `python -m benchmarks.misuse_costs`. Those that compare ranks are measured by `guard_ranks`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.core.api.lone_rank import fake_process_group
from shardwright.core.misuse.before_backward import refuse_other_draws, refuse_transforms
from shardwright.core.misuse.gathered_copies import refuse_lost_writes
from shardwright.core.misuse.original import FIRST_CALLS, OriginalModel
from shardwright.core.misuse.planned_parameters import FIRST_CALLS as FIRST_LOOKS
from shardwright.core.misuse.planned_parameters import PlannedParameters

CALLS, LAYERS = 400, 32


def main() -> None:
    torch.set_num_threads(1)
    views()
    show("transforms", refuse_transforms)
    show("other draws", refuse_other_draws)
    net = nn.Sequential(*(nn.TransformerEncoderLayer(8, 1, 8) for _ in range(LAYERS)))
    planned = PlannedParameters(net, ())
    for _ in range(FIRST_LOOKS):
        planned.frozen_or_unfrozen()
    show(f"parameters of {LAYERS} layers", planned.frozen_or_unfrozen)
    original = OriginalModel(net, ())
    show(f"the original of {LAYERS} layers, first calls", lambda: original.check(net), FIRST_CALLS)
    show("the same, later", lambda: original.check(net))


def views() -> None:
    with fake_process_group(0, 2), torch.no_grad():
        mesh = init_device_mesh("cpu", (2,))
        cut = [DTensor.from_local(torch.randn(8, 8), mesh, [Shard(dim)]) for dim in range(2)]
        for checked in ("without a check", "with a check"):
            show(f"a view that is local, {checked}", lambda: cut[0][:, :2])
            show(f"a view that is gathered, {checked}", lambda: cut[1][:, :2])
            refuse_lost_writes()


def show(what: str, call: Callable[[], object], calls: int = CALLS) -> None:
    times = []
    for _ in range(calls):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    print(f"{what}: {1e6 * statistics.median(times):.1f} us", flush=True)


if __name__ == "__main__":
    main()

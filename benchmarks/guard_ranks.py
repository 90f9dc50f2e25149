"""Measures on these ranks what it costs a step to see whether the model was changed, and to compare
the step with other ranks, and what it costs to compare the values of parameters; rank 0 prints the
numbers.

A step that has seen that its parameters are those of the plan need not read them from their
modules, which takes a time of its own."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.core.agreement.collective import take_values_of_rank_0
from shardwright.core.misuse import batch_guard
from shardwright.core.misuse.planned_parameters import FIRST_CALLS
from shardwright.core.parallel import module
from shardwright.models import Dimensions, build

STEPS, CALLS, MEBIBYTES = 15, 300, 256


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    sizes = Dimensions(
        family="llama",
        hidden_size=64,
        num_layers=32,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=128,
        vocab_size=256,
        seq_length=128,
        norm_eps=1e-5,
    )
    net = build(sizes)
    ids = torch.randint(256, (8, 128), generator=torch.Generator().manual_seed(0))
    plan = sw.plan(net, (ids, ids), devices=dist.get_world_size(), mode="data_parallel")
    parallel: Any = sw.parallelize(net, plan, copy=True)
    calls: list[tuple[Any, ...]] = []
    begin = parallel.execution._guard.begin
    parallel.execution._guard.begin = lambda *call: (calls.append(call), begin(*call))
    parallel.train_step(ids, ids)
    last = calls[-1]
    parallel.execution._guard.begin = begin
    step, bare = compared_steps(lambda: parallel.train_step(ids, ids), parallel.execution._guard)
    devices = parallel.execution.devices
    counted = statistics.median(seconds(lambda: count_call(devices), CALLS, pause=0.001))
    batch_guard.PERIOD = 10**9  # type: ignore[misc]
    shapes = statistics.median(seconds(lambda: begin(*last), CALLS, pause=0.001))
    batch_guard.PERIOD = 1  # type: ignore[misc]
    contents = statistics.median(seconds(lambda: begin(*last), CALLS, pause=0.001))
    planned = parallel.execution._parameters_as_planned

    def look() -> None:
        parallel.execution._state.key()
        planned.frozen_or_unfrozen()

    for _ in range(FIRST_CALLS):
        look()
    state = statistics.median(seconds(look, CALLS, pause=0.001))
    places = [
        (parallel.get_submodule(path), leaf)
        for path, _, leaf in (name.rpartition(".") for name, _ in parallel.named_parameters())
    ]
    read = statistics.median(
        seconds(lambda: [getattr(bearer, leaf) for bearer, leaf in places], CALLS, pause=0.001)
    )
    torch.manual_seed(0)
    tensors = {"weights": torch.randn(MEBIBYTES * 2**18)}
    device = torch.device("cpu")
    (equal,) = seconds(lambda: take_values_of_rank_0(tensors, device), 1)
    tensors["weights"] += dist.get_rank()
    (sent,) = seconds(lambda: take_values_of_rank_0(tensors, device), 1)
    if dist.get_rank() == 0:
        numbers = {"step": step, "shapes": shapes, "contents": contents, "state": state}
        numbers |= {"bare": bare, "counted": counted}
        print(json.dumps({**numbers, "read": read, "equal": equal, "sent": sent}), flush=True)
    dist.destroy_process_group()


def compared_steps(step: Callable[[], object], guard: Any) -> tuple[float, float]:
    """Seconds of a step as it is, and of one that neither counts calls nor compares batches, in
    turn, as other work on the machine varies."""
    model_call, usual, bare = module.model_call, [], []
    for _ in range(STEPS):
        usual += seconds(step, 1)
        guard._active, module.model_call = False, lambda *_: nullcontext()
        bare += seconds(step, 1)
        guard._active, module.model_call = True, model_call
    return statistics.median(usual), statistics.median(bare)


def count_call(devices: Any) -> None:
    with module.model_call("train_step", devices):
        pass


def seconds(call: Callable[[], object], times: int, pause: float = 0.0) -> list[float]:
    """The CPU seconds of the calling thread, as other ranks compute on the same cores, for each of
    many calls; of a few calls the whole time."""
    clock = time.thread_time if pause else time.perf_counter
    durations = []
    for _ in range(times):
        time.sleep(pause)
        started = clock()
        call()
        durations.append(clock() - started)
    return durations


if __name__ == "__main__":
    main()

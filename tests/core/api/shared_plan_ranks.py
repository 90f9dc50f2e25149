"""What `test_shared_plan.py` runs on each of three processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from features.agreement_ranks import BATCH, perceptron, refused
from shardwright.core.capture.capture import capture
from torchrun import run_checks

TIMEOUT = 10.0
RANKS = 3
BATCH_OF_SIX = tuple(part[:6] for part in BATCH)


@contextmanager
def captures(on_rank_0: int, seconds: float = 0.0) -> Iterator[None]:
    """So many on rank 0, each of which takes so long, and none elsewhere."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        calls.append(args)
        return capture(*args, **kwargs)

    calls = list[Any]()
    rooms = [import_module(f"shardwright.core.api.{name}") for name in ("decide", "parallelize")]
    with (
        mock.patch.multiple(rooms[0], capture=counted),
        mock.patch.multiple(rooms[1], capture=counted),
    ):
        yield
    assert len(calls) == (0 if dist.get_rank() else on_rank_0), calls


def model() -> nn.Module:
    torch.manual_seed(0)
    return perceptron()


def planned(net: nn.Module, **options: Any) -> sw.Plan:
    return sw.plan(net, BATCH_OF_SIX, devices=RANKS, **options)


def assert_trains(parallel: nn.Module) -> None:
    torch.testing.assert_close(parallel.train_step(*BATCH_OF_SIX), model()(*BATCH_OF_SIX))


def check_only_rank_0_captures_longer_than_collectives_wait() -> None:
    with captures(on_rank_0=1, seconds=1.5 * TIMEOUT):
        net = model()
        assert dist.group.WORLD is not None
        dist.barrier()
        set_group_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
        plan = planned(net)
        set_group_timeout(timedelta(minutes=3), dist.group.WORLD)
        parallel = sw.parallelize(net, plan, copy=True)
    assert_trains(parallel)
    assert plan.optimizer == "adamw" and plan.memory.peak > 0


def check_an_auto_parallel_model_is_planned_once() -> None:
    with captures(on_rank_0=1):
        net = sw.AutoParallel(model())
        net.compile(*BATCH_OF_SIX)
    assert_trains(net)


def check_the_model_of_a_plan_from_a_file_is_captured_once() -> None:
    net = model()
    plan = sw.Plan.from_json(planned(net).to_json())
    with captures(on_rank_0=1):
        parallel = sw.parallelize(net, plan, copy=True)
    assert_trains(parallel)
    here = plan if dist.get_rank() else planned(net, collective=False)
    with captures(on_rank_0=0):  # It has the graph of its own plan.
        sw.parallelize(net, here, copy=True)


def check_marked_function_calls_are_planned_once() -> None:
    def hidden(x: Tensor) -> Tensor:
        return torch.relu(x)

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)
            self.marked = sw.recompute(hidden)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.marked(self.net(x)), y)

    net = Marked()
    with captures(on_rank_0=1):
        plan = planned(net)
        sw.parallelize(net, plan, copy=True)
    assert plan.recompute


def check_what_rank_0_raises_is_raised_on_all() -> None:
    with refused(sw.MemoryLimitError):
        planned(model(), memory_limit=64)
    try:
        planned(model(), memory_limit=64)
    except sw.MemoryLimitError as error:
        assert error.needed > 64

    class Broken(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if dist.get_rank() == 0:
                raise ValueError("only here")
            return x.sum()

    with refused(Exception, "only here"):
        planned(Broken())


def check_ranks_may_plan_alone() -> None:
    net = model()
    for rank in range(RANKS):
        if dist.get_rank() == rank:
            sw.plan(net, BATCH_OF_SIX, devices=RANKS, collective=False)
            sw.plan(net, BATCH, devices=2)
    if dist.get_rank() == 0:
        planned(net, mem_coeff=10.0)
    assert_trains(sw.parallelize(net, planned(net), copy=True))


def check_other_code_of_forward_on_one_rank_is_refused_on_all() -> None:
    class Rectified(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    class Smooth(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(x)

    for here, there in ((Rectified(), Smooth()), (nn.ReLU(), nn.GELU())):
        net = model()
        net.net[1] = there if dist.get_rank() == 2 else here
        with refused(sw.PlanError):
            sw.parallelize(net, planned(net), copy=True)


class ImportsItsResult(nn.Module):
    """Imports the class of its result in `forward`, which rank 0 alone runs in `sw.plan`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        from core.api.late_output import LateOutput

        return LateOutput(hidden=self.layer(x))


def check_a_class_of_results_may_be_imported_in_forward() -> None:
    torch.manual_seed(0)
    assert "core.api.late_output" not in sys.modules
    net, x = ImportsItsResult(), torch.ones(6, 8)
    parallel = sw.parallelize(net, sw.plan(net, (x,), devices=RANKS), copy=True)
    torch.testing.assert_close(full(parallel(x).hidden), net(x).hidden)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


CHECKS = (
    check_a_class_of_results_may_be_imported_in_forward,
    check_only_rank_0_captures_longer_than_collectives_wait,
    check_an_auto_parallel_model_is_planned_once,
    check_the_model_of_a_plan_from_a_file_is_captured_once,
    check_marked_function_calls_are_planned_once,
    check_what_rank_0_raises_is_raised_on_all,
    check_other_code_of_forward_on_one_rank_is_refused_on_all,
    check_ranks_may_plan_alone,
)


if __name__ == "__main__":
    run_checks(CHECKS)

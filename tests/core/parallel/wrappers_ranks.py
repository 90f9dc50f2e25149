"""PyTorch's wrappers around planned models, on two ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

import shardwright as sw

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchrun import run_checks

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "DataParallel": lambda net: DataParallel(net, device_ids=[0, 1]),
    "`replicate`": replicate,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.up(x).relu()) * self.scale, y)


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.arange(256.0).sin().view(2, 16, 8)
    return x, y


def planned(net: nn.Module | None = None, **options: object) -> nn.Module:
    net = net or Net()
    return sw.parallelize(net, sw.plan(net, batch(), devices=2, **options))


def wrappers_of_planned_models_are_refused() -> None:
    for options in ({}, {"stages": 2, "micro_batches": 2}):
        net = planned(**options)
        for name, wrap in WRAPPERS.items():
            with pytest.raises(sw.PlanError, match=rf"^{name} wraps the planned Net, which .*\n"):
                wrap(net)
            # Also within a model that has parameters of its own.
            outer = nn.ModuleDict({"net": net, "head": nn.Linear(2, 2)})
            with pytest.raises(sw.PlanError, match=rf"^{name} wraps the planned Net \('net'\)"):
                wrap(outer)
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(sw.PlanError, match=r"^`parallelize_module` was called on a planned"):
            parallelize_module(net, mesh, {"*": ColwiseParallel()})


def wrappers_of_other_models_are_not_refused() -> None:
    planned()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(nn.Linear(8, 16), mesh, ColwiseParallel())
    # A planned model whose tensors the wrapper ignores; the wrapper reduces those of the head.
    outer = nn.ModuleDict({"net": planned(), "head": nn.Linear(2, 2)})
    tensors = (*outer.named_parameters(), *outer.named_buffers())
    names = [name for name, _ in tensors if name.startswith("net.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, names)
    DistributedDataParallel(outer)


def a_replicated_model_is_not_planned() -> None:
    net = replicate(Net())
    with pytest.raises(sw.PlanError, match="the model is wrapped by `replicate` already"):
        sw.plan(net, batch(), devices=2)


def a_model_that_was_compiled_before_runs_its_program() -> None:
    torch.manual_seed(0)
    net = Net()
    expected = net(*batch())
    net.compile(backend="eager")
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    torch.testing.assert_close(planned(net)(*batch()), expected)
    (message,) = logged
    assert message.startswith("Net was compiled before it was planned, which has no effect\ncall")


CHECKS = (
    wrappers_of_planned_models_are_refused,
    wrappers_of_other_models_are_not_refused,
    a_replicated_model_is_not_planned,
    a_model_that_was_compiled_before_runs_its_program,
)

if __name__ == "__main__":
    run_checks(CHECKS)

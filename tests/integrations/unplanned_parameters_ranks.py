"""Trainings on two ranks of modules with parameters outside of planned models, and of several
models."""

from __future__ import annotations

import logging
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning import Fabric, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shardwright as sw

sys.path.insert(0, str(Path(__file__).parents[1]))

from shardwright.errors import PlanError
from shardwright.integrations.accelerate import prepare
from shardwright.integrations.fabric import FabricStrategy
from shardwright.integrations.lightning import ShardwrightStrategy
from torchrun import run_checks

RATE = 0.1
LOCAL = {"dataset_strategy": "data_parallel"}
OF_THIS_RANK = "has a gradient of this rank's samples only"


class WithMethod(nn.Linear):
    """A model whose loss is a method that does not call it, so that it is not planned."""

    def loss(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias).sum()


class Scaled(LightningModule):
    """Has a parameter beside the model that its step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self.net(batch) * self.scale).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def launched(**options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**options))
    fabric.launch()
    return fabric


def seeded(make: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


def stepped_by_fabric(inputs: Tensor, **options: Any) -> nn.Module:
    fabric = launched(**options)
    net: Any = seeded(lambda: WithMethod(3, 4), dist.get_rank())
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=RATE))
    net.mark_forward_method("loss")
    fabric.backward(net.loss(inputs))
    optimizer.step()
    return net.module


def stepped_by_accelerate(inputs: Tensor, **options: Any) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    net = seeded(lambda: WithMethod(3, 4), dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net, optimizer = prepare(accelerator, net, optimizer, **options)
    accelerator.backward(net.loss(inputs))
    optimizer.step()
    return net


def stepped_by_trainer(inputs: Tensor, **options: Any) -> nn.Module:
    module = seeded(Scaled, dist.get_rank())
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardwrightStrategy(**options),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(inputs, batch_size=len(inputs) // trainer.world_size))
    return module


def unplanned_parameters_start_from_rank_0() -> None:
    for stepped in (stepped_by_fabric, stepped_by_accelerate):
        wanted = seeded(lambda: WithMethod(3, 4), 0)
        net = stepped(torch.ones(4, 3))
        torch.testing.assert_close(net.weight.detach(), wanted.weight.detach() - RATE * 4)
    module: Any = stepped_by_trainer(torch.zeros(2, 3))
    start = seeded(Scaled, 0)
    wanted = start.scale.detach()
    for _ in range(2):
        # Of zeros, the gradient of `scale` is the bias, and that of the bias is `scale`.
        bias = start.net.bias.detach().clone()
        start.net.bias.data -= RATE * wanted
        wanted = wanted - RATE * bias
    torch.testing.assert_close(module.scale.detach(), wanted)


def unplanned_parameters_get_no_gradients_of_local_batches() -> None:
    inputs = torch.full((4, 3), 1.0 + dist.get_rank())
    for stepped in (stepped_by_fabric, stepped_by_accelerate):
        with pytest.raises(PlanError, match=f"'weight' of WithMethod {OF_THIS_RANK}"):
            stepped(inputs, **LOCAL)
    with pytest.raises(PlanError, match=f"'scale' of Scaled {OF_THIS_RANK}"):
        stepped_by_trainer(torch.rand(4, 3, generator=torch.Generator().manual_seed(0)), **LOCAL)


def optimizers_of_all_models_are_set_up_last() -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    plan = sw.plan(nn.Linear(4, 4), (inputs,), devices=2, mem_coeff=1e6)
    fabric = launched(plan=plan)
    nets: list[Any] = [seeded(lambda: nn.Linear(4, 4), seed) for seed in (0, 1)]
    wanted = deepcopy(nets)
    optimizers: Any = [torch.optim.SGD(net.parameters(), lr=RATE) for net in nets]
    nets = [fabric.setup_module(net) for net in nets]
    optimizers = fabric.setup_optimizers(*optimizers)
    fabric.backward((nets[0](inputs) - nets[1](inputs)).square().sum())
    (wanted[0](inputs) - wanted[1](inputs)).square().sum().backward()
    for optimizer, net, each in zip(optimizers, nets, wanted, strict=True):
        optimizer.step()
        torch.optim.SGD(each.parameters(), lr=RATE).step()
        torch.testing.assert_close(net.weight.full_tensor().detach(), each.weight.detach())


def models_divide_batches_equally() -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    local = sw.plan(nn.Linear(4, 4), (inputs,), devices=2, **LOCAL)
    fabric = launched()
    fabric.setup_dataloaders(DataLoader(inputs, batch_size=4))
    with pytest.raises(PlanError, match="divides a batch into 2 shards, but earlier models"):
        fabric.setup_module(sw.parallelize(nn.Linear(4, 4), local))


CHECKS = (
    unplanned_parameters_start_from_rank_0,
    unplanned_parameters_get_no_gradients_of_local_batches,
    optimizers_of_all_models_are_set_up_last,
    models_divide_batches_equally,
)

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run_checks(CHECKS)

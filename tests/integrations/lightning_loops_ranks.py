"""Training loops of Lightning that change parameters or random numbers by themselves, on two ranks,
compared with one process."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Fabric, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from shardwright.integrations.fabric import FabricStrategy
from shardwright.integrations.lightning import ShardwrightStrategy
from torchrun import run_checks


class Recording(LightningModule):
    """Records the loss of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adversarial(Recording):
    """Two models, of which only one is trained at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, _: int) -> None:
        of_net, of_critic = self.optimizers()
        for optimizer, sign in ((of_net, -1), (of_critic, 1)):
            self.toggle_optimizer(optimizer)
            loss = sign * (self.critic(self.net(batch[0])) - self.critic(batch[1])).mean()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.critic)]


def samples() -> TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(32, 8, generator=numbers), torch.randn(32, 4, generator=numbers)
    )


def trained(
    module: type[Recording], devices: int, *, shuffle: bool = False, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two epochs, and the parameters of a submodule after them."""
    seed_everything(0, verbose=False)
    net = module()
    if devices > 1:
        options["strategy"] = ShardwrightStrategy()
    trainer = Trainer(
        **options,
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(samples(), batch_size=8, shuffle=shuffle))
    parameters = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p
        for name, p in net.net.named_parameters()
    }
    return net.losses, {name: p.detach() for name, p in parameters.items()}


def assert_as_one_process(module: type[Recording], **options: Any) -> None:
    # Callbacks have state, so each training has its own.
    make_callbacks = options.pop("callbacks", list)
    world = dist.get_world_size()
    found, wanted = (
        trained(module, devices, callbacks=make_callbacks(), **options) for devices in (world, 1)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def shuffled_loaders_draw_the_order_of_one_process() -> None:
    assert_as_one_process(Recording, shuffle=True)


def toggled_optimizers_train_their_models() -> None:
    assert_as_one_process(Adversarial)


def stochastic_weight_averaging_averages_sharded_parameters() -> None:
    assert_as_one_process(
        Recording,
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)],
    )


class InStages(Recording):
    """Calls a model that returns its loss, as models in stages do."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.net: nn.Module = sw.WithLoss(layers, nn.MSELoss())

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.net(*batch)


def averages_of_stages_are_refused() -> None:
    for callback in (StochasticWeightAveraging(swa_lrs=0.01), EMAWeightAveraging()):
        trainer = Trainer(
            strategy=ShardwrightStrategy(stages=2, micro_batches=2),
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_epochs=1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with pytest.raises(sw.PlanError, match="pairs the parameters of a model"):
            trainer.fit(InStages(), DataLoader(samples(), batch_size=8))


def averaged(devices: int) -> tuple[list[float], list[float]]:
    """Train with Fabric on local batches, and return losses of the model and of its average, which
    is created before the model is planned."""
    alone = devices == 1
    strategy = "auto" if alone else FabricStrategy(dataset_strategy="data_parallel")
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=8 // devices))
    losses, averaged_losses = [], []
    for x, y in loader:
        loss = nn.functional.mse_loss(net(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
        with torch.no_grad():
            average_loss = nn.functional.mse_loss(average(x), y)
        losses.append(float(fabric.all_reduce(loss.detach())))
        averaged_losses.append(float(fabric.all_reduce(average_loss)))
    return losses, averaged_losses


def an_average_created_before_planning_follows_the_model() -> None:
    torch.testing.assert_close(averaged(dist.get_world_size()), averaged(1), rtol=1e-5, atol=1e-6)


CHECKS = (
    an_average_created_before_planning_follows_the_model,
    shuffled_loaders_draw_the_order_of_one_process,
    toggled_optimizers_train_their_models,
    stochastic_weight_averaging_averages_sharded_parameters,
    averages_of_stages_are_refused,
)

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run_checks(CHECKS)

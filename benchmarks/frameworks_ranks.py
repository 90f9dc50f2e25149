"""What `bench_frameworks.py` runs on every rank: a training of each framework under each plan.

python -m benchmarks.frameworks_ranks FOLDER PHASE..., with PHASE `save`, for the first epoch and
its checkpoint, or `resume`, for the second epoch. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning import Fabric, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwright as sw
from shardwright.integrations.accelerate import prepare
from shardwright.integrations.fabric import FabricStrategy
from shardwright.integrations.lightning import ShardwrightStrategy

WIDTH, CLASSES, BATCH, SAMPLES, ACCUMULATED, MAX_NORM = 64, 8, 16, 128, 2, 0.2
PLANS = ("data parallel", "tensor parallel", "level3", "pipeline")
Numbers = dict[str, list[float]]
"""Of one epoch: `loss` of each batch, `norm` before clipping of each step, `evaluation` loss."""


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x).tanh()
        return nn.functional.cross_entropy(self.head(x), y)


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def loader() -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=numbers)
    y = torch.randint(CLASSES, (SAMPLES,), generator=numbers)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def plan_of(net: Classifier, name: str) -> sw.Plan:
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {"devices": devices, "mode": "data_parallel"}
    if name == "level3":
        options["hsdp"] = {"level": "level3", "threshold": 0}
    if name == "pipeline":
        options |= {"stages": min(2, devices), "micro_batches": 2}
    if name == "tensor parallel":
        options["mode"] = "sharding_propagation"
        for number, layer in enumerate(net.hidden):
            columns = number % 2 == 0
            x, weight = ((1, 1), (devices, 1)) if columns else ((1, devices), (1, devices))
            sw.shard(layer, (x, weight))
    shapes = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.long)
    return sw.plan(net, shapes, **options)


def one_process(epochs: int) -> list[Numbers]:
    """The epochs without any framework."""
    net = model()
    optimizer = optimizer_of(net)
    return [_epoch(net, optimizer, loader(), Loop()) for _ in range(epochs)]


class Loop:
    """Calls of a framework in a written training loop; these are those of one process."""

    def backward(self, loss: Tensor) -> None:
        (loss / ACCUMULATED).backward()

    def clip(self, net: nn.Module, optimizer: Any) -> float:
        return float(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM))


def _epoch(net: nn.Module, optimizer: Any, batches: Any, loop: Loop) -> Numbers:
    numbers: Numbers = {"loss": [], "norm": [], "evaluation": []}
    for number, (x, y) in enumerate(batches, start=1):
        loss = net(x, y)
        numbers["loss"].append(loss.item())
        loop.backward(loss)
        if number % ACCUMULATED == 0:
            numbers["norm"].append(loop.clip(net, optimizer))
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        losses = [float(net(x, y)) for x, y in batches]
    net.train()
    numbers["evaluation"].append(sum(losses) / len(losses))
    return numbers


class AccelerateLoop(Loop):
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss / ACCUMULATED)

    def clip(self, net: nn.Module, optimizer: Any) -> float:
        return float(self.accelerator.clip_grad_norm_(net.parameters(), MAX_NORM))


def accelerate(plan: str, phase: str, path: Path) -> Numbers:
    accelerator = Accelerator(cpu=True)
    net = model()
    planned = plan_of(net, plan)
    optimizer = optimizer_of(net)
    net, optimizer, batches = prepare(accelerator, net, optimizer, loader(), plan=planned)
    if phase == "resume":
        accelerator.load_state(str(path))
    numbers = _epoch(net, optimizer, batches, AccelerateLoop(accelerator))
    if phase == "save":
        accelerator.save_state(str(path))
    return numbers


class FabricLoop(Loop):
    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss / ACCUMULATED)

    def clip(self, net: nn.Module, optimizer: Any) -> float:
        return float(self.fabric.clip_gradients(net, optimizer, max_norm=MAX_NORM))


def fabric(plan: str, phase: str, path: Path) -> Numbers:
    net = model()
    strategy = FabricStrategy(plan_of(net, plan))
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    own = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    own.launch()
    module, optimizer = own.setup(net, optimizer_of(net))
    batches = own.setup_dataloaders(loader())
    state = {"net": module, "optimizer": optimizer}
    if phase == "resume":
        own.load(path, state)
    numbers = _epoch(module, optimizer, batches, FabricLoop(own))
    if phase == "save":
        own.save(path, state)
    return numbers


class Module(LightningModule):
    def __init__(self, net: Classifier) -> None:
        super().__init__()
        self.net = net
        self.numbers: Numbers = {"loss": [], "norm": [], "evaluation": []}

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss: Tensor = self.net(*batch)
        self.numbers["loss"].append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p is not None])
        self.numbers["norm"].append(float(norm))

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("evaluation", self.net(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def trainer(plan: str, phase: str, path: Path) -> Numbers:
    net = model()
    strategy = ShardwrightStrategy(plan_of(net, plan))
    own = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
        max_epochs=1 if phase == "save" else 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=MAX_NORM,
        accumulate_grad_batches=ACCUMULATED,
        num_sanity_val_steps=0,
    )
    module = Module(net)
    options = {"ckpt_path": str(path), "weights_only": False} if phase == "resume" else {}
    own.fit(module, loader(), loader(), **options)
    module.numbers["evaluation"].append(float(own.callback_metrics["evaluation"]))
    if phase == "save":
        own.save_checkpoint(path)
    return module.numbers


FRAMEWORKS: dict[str, Callable[[str, str, Path], Numbers]] = {
    "Accelerate": accelerate,
    "Lightning Trainer": trainer,
    "Lightning Fabric": fabric,
}


def main(folder: str, *phases: str) -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {
        phase: {
            f"{framework}, {plan}": run(plan, phase, Path(folder, f"{framework}, {plan}"))
            for framework, run in FRAMEWORKS.items()
            for plan in PLANS
        }
        for phase in phases
    }
    found["one process"] = one_process(2)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

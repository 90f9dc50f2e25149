"""Trainings of Lightning's Trainer and Fabric with planned models on two ranks, compared with one
process.

python lightning_ranks.py FOLDER
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import strategies
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import shardwright as sw

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.frameworks_cases import (
    ACCUMULATED,
    BATCH,
    MAX_NORM,
    Classifier,
    OneProcess,
    Run,
    WithLoss,
    assert_equal_runs,
    classifier,
    loader,
    optimizer_of,
    samples,
    schedule_of,
)
from shardwright.errors import DataError, PlanError
from shardwright.integrations.fabric import FabricStrategy
from shardwright.integrations.full_state import full_model_state
from shardwright.integrations.lightning import ShardwrightStrategy
from torchrun import run_checks

COUNT = 64
SHAPES = torch.zeros(BATCH, 16), torch.zeros(BATCH, dtype=torch.long)


def folder() -> Path:
    return Path(sys.argv[1])


def on_rank_0() -> bool:
    return dist.get_rank() == 0


class Module(LightningModule):
    def __init__(self, net: Classifier | None = None, *, calls_itself: bool = False) -> None:
        super().__init__()
        # Each rank draws other parameters; those of rank 0 are trained.
        self.net = net or classifier(dist.get_rank())
        self.counted = torchmetrics.SumMetric()
        self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=4)
        self.calls_itself, self.run, self.totals = calls_itself, Run(), []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        if isinstance(self.net, WithLoss):
            loss = self.net(x, y)
        else:
            loss = nn.functional.cross_entropy(self(x) if self.calls_itself else self.net(x), y)
        self.run.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p is not None]
        self.run.norms.append(float(nn.utils.get_total_norm(gradients)))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.run.rates.append(scheduler.get_last_lr()[0])

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        if isinstance(self.net, WithLoss):
            self.log("loss", self.net(x, y), sync_dist=True)
            return
        self.counted.update(float(len(x)))
        self.confusion.update(self.net(x).argmax(-1), y)
        self.log("samples", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.log("counted", self.counted)

    def on_validation_epoch_end(self) -> None:
        if not isinstance(self.net, WithLoss):
            self.totals.append(int(self.confusion.compute().sum()))
            self.confusion.reset()

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        return [optimizer], [{"scheduler": schedule_of(optimizer), "interval": "step"}]


class PlansItself(Module):
    """Plans its model where Lightning's own strategies for several devices have it planned."""

    def configure_model(self) -> None:
        if not hasattr(self.net, "execution"):
            sw.parallelize(self.net, sw.plan(self.net, SHAPES[:1], devices=2))


def trained(
    module: Module,
    strategy: Any,
    epochs: int = 1,
    *,
    keep_sampler: bool = False,
    precision: Any = None,
    **options: Any,
) -> tuple[Run, Trainer]:
    trainer = Trainer(
        precision=precision,
        use_distributed_sampler=not keep_sampler,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=MAX_NORM,
        accumulate_grad_batches=ACCUMULATED,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loader(COUNT), loader(COUNT), **options)
    module.run.state = {
        name.removeprefix("net."): value
        for name, value in full_model_state(module).items()
        if name.startswith("net.")
    }
    return module.run, trainer


def reference(epochs: int) -> list[Run]:
    training = OneProcess(COUNT)
    return [training.epoch() for _ in range(epochs)]


def trains_and_counts_as_one_process() -> None:
    (wanted,) = reference(1)
    plan = sw.plan(classifier(0), SHAPES[:1], devices=2)
    for options, calls_itself in (({}, False), ({}, True), ({"plan": plan}, False)):
        module = Module(calls_itself=calls_itself)
        run, trainer = trained(module, ShardwrightStrategy(**options))
        assert_equal_runs(run, wanted, with_state=on_rank_0())
        assert module.totals == [COUNT]
        metrics = {name: int(value) for name, value in trainer.callback_metrics.items()}
        assert metrics == {"samples": COUNT, "counted": COUNT}
    module = PlansItself()
    run, _ = trained(module, ShardwrightStrategy())
    assert_equal_runs(run, wanted, with_state=on_rank_0())
    assert module.totals == [COUNT]


def local_batches_count_each_sample_once() -> None:
    module = Module()
    strategy = ShardwrightStrategy(dataset_strategy="data_parallel")
    run, trainer = trained(module, strategy)
    # Each rank has 16 samples in a step, as under `DDPStrategy`.
    assert len(run.losses) == COUNT // BATCH // 2
    assert module.totals == [COUNT]
    assert int(trainer.callback_metrics["counted"]) == COUNT
    seen = strategy.all_gather(torch.full((3,), float(dist.get_rank())))
    assert seen.shape == (2, 3)
    assert seen[:, 0].tolist() == [0, 1]


def stages_train_and_resume_as_one_process() -> None:
    wanted, later = reference(2)
    for is_folder in (True, False):
        path = folder() / ("stages" if is_folder else "stages.ckpt")
        net = classifier(0, WithLoss)
        plan = sw.plan(net, SHAPES, devices=2, stages=2, micro_batches=2)
        strategy = ShardwrightStrategy(plan, save_distributed_checkpoint=is_folder)
        run, trainer = trained(Module(net), strategy)
        assert_equal_runs(run, wanted, with_state=on_rank_0())
        trainer.save_checkpoint(path)
        for stages in (2, 1):
            net = classifier(9, WithLoss)
            plan_to_resume = sw.plan(net, SHAPES, devices=2, stages=stages, micro_batches=2)
            strategy = ShardwrightStrategy(plan_to_resume, save_distributed_checkpoint=is_folder)
            options = {"ckpt_path": str(path), "weights_only": False}
            run, _ = trained(Module(net), strategy, 2, **options)
            assert_equal_runs(run, later, with_state=on_rank_0())


def resumes_under_another_plan() -> None:
    wanted = reference(2)
    tensor_parallel = {"mode": "recursive_programming", "mem_coeff": 64.0}
    _, trainer = trained(Module(), ShardwrightStrategy(**tensor_parallel))
    trainer.save_checkpoint(folder() / "one.ckpt")
    plan = sw.plan(classifier(0), SHAPES[:1], devices=2, mode="data_parallel")
    strategies = {
        "one.ckpt": ShardwrightStrategy(plan, save_distributed_checkpoint=True),
        "folder": ShardwrightStrategy(),
    }
    # A resumed run sees its second epoch; `weights_only` is for classes of Lightning's loops.
    for name, strategy in strategies.items():
        module = Module(classifier(9))
        path = str(folder() / name)
        run, trainer = trained(module, strategy, 2, ckpt_path=path, weights_only=False)
        assert_equal_runs(run, wanted[1], with_state=on_rank_0())
        if name == "one.ckpt":
            # The state after the first epoch as a folder, for the next turn.
            module = Module()
            options = {"save_distributed_checkpoint": True, **tensor_parallel}
            _, trainer = trained(module, ShardwrightStrategy(**options))
            trainer.save_checkpoint(folder() / "folder")


def fabric_trains_and_resumes() -> None:
    wanted = reference(2)
    for number, options in enumerate(
        ({}, {"save_distributed_checkpoint": True}, {"dataset_strategy": "data_parallel"})
    ):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**options))
        fabric.launch()
        state, batches = of_fabric(fabric, dist.get_rank())
        run = fabric_epoch(fabric, batches, **state)
        fabric.save(folder() / f"fabric{number}", {**state, "step": 3})
        fresh, batches = of_fabric(fabric, 9)
        loaded = {**fresh, "step": 0}
        fabric.load(folder() / f"fabric{number}", loaded)
        assert loaded["step"] == 3
        resumed = fabric_epoch(fabric, batches, **fresh)
        if "dataset_strategy" not in options:
            assert_equal_runs(run, wanted[0], with_state=on_rank_0())
            assert_equal_runs(resumed, wanted[1], with_state=on_rank_0())


def precision_plugins_choose_the_dtype() -> None:
    for precision, dtype, rtol in (
        ("64-true", torch.float64, 1e-9),
        ("bf16-true", torch.bfloat16, 2e-2),
    ):
        wanted = OneProcess(COUNT, dtype).epoch()
        plan = sw.plan(classifier(0).to(dtype), (SHAPES[0].to(dtype),), devices=2)
        for options in ({}, {"plan": plan}):
            module = Module()
            run, _ = trained(module, ShardwrightStrategy(**options), precision=precision)
            assert {p.dtype for p in module.parameters()} == {dtype}
            assert_close_losses(run, wanted, rtol)
        fabric = Fabric(
            accelerator="cpu", devices=2, strategy=FabricStrategy(), precision=precision
        )
        fabric.launch()
        state, batches = of_fabric(fabric, dist.get_rank())
        run = fabric_epoch(fabric, batches, **state)
        assert {p.dtype for p in state["net"].parameters()} == {dtype}
        # Fabric casts what the model returns to float32, in which the loss is computed.
        assert_close_losses(run, wanted, max(rtol, 1e-6))
    in_float32 = sw.plan(classifier(0), SHAPES[:1], devices=2)
    with pytest.raises(PlanError, match="plan the model"):
        trained(Module(), ShardwrightStrategy(in_float32), precision="64-true")


def assert_close_losses(found: Run, wanted: Run, rtol: float) -> None:
    for name in ("losses", "norms"):
        of_found, of_wanted = (
            torch.tensor(getattr(run, name), dtype=torch.float64) for run in (found, wanted)
        )
        torch.testing.assert_close(of_found, of_wanted, rtol=rtol, atol=rtol)


def model_parallel_strategy_takes_a_plan() -> None:
    (wanted,) = reference(1)
    plan = sw.plan(classifier(0), SHAPES[:1], devices=2)
    strategy = ModelParallelStrategy(
        parallelize_fn=lambda net, mesh: sw.parallelize(net, plan), data_parallel_size=1
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = fabric.setup_module(classifier(dist.get_rank()))
    optimizer = fabric.setup_optimizers(optimizer_of(net))
    batches = fabric.setup_dataloaders(loader(COUNT))
    run = fabric_epoch(fabric, batches, net, optimizer, schedule_of(optimizer))
    assert_equal_runs(run, wanted, with_state=on_rank_0())
    # The sampler that the trainer adds shuffles, also for one part of the data.
    of_trainer = strategies.ModelParallelStrategy(data_parallel_size=1)
    run, _ = trained(PlansItself(), of_trainer, keep_sampler=True)
    assert_equal_runs(run, wanted, with_state=on_rank_0())


def of_fabric(fabric: Fabric, seed: int) -> tuple[dict[str, Any], Any]:
    net = classifier(seed)
    net, optimizer = fabric.setup(net, optimizer_of(net))
    state = {"net": net, "optimizer": optimizer, "schedule": schedule_of(optimizer)}
    return state, fabric.setup_dataloaders(loader(COUNT))


def fabric_epoch(fabric: Fabric, batches: Any, net: Any, optimizer: Any, schedule: Any) -> Run:
    run = Run()
    for number, (x, y) in enumerate(batches, start=1):
        with fabric.no_backward_sync(net, enabled=number % ACCUMULATED != 0):
            loss = nn.functional.cross_entropy(net(x), y)
            run.losses.append(float(fabric.all_reduce(loss.detach())))
            fabric.backward(loss / ACCUMULATED)
        if number % ACCUMULATED == 0 or number == len(batches):
            norm = fabric.clip_gradients(net, optimizer, max_norm=MAX_NORM)
            run.norms.append(float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.rates.append(schedule.get_last_lr()[0])
    run.state = dict(full_model_state(net.module))
    return run


def refuses_what_would_be_wrong() -> None:
    data = samples(COUNT)
    divided = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy())
    fabric.launch()
    with pytest.raises(DataError, match="of 2, but the plan needs the full batch on every rank"):
        fabric.setup_dataloaders(divided)
    local = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=FabricStrategy(dataset_strategy="data_parallel"),
    )
    local.launch()
    with pytest.raises(DataError, match="the loader gives every rank the full batch, but the plan"):
        local.setup_dataloaders(loader(COUNT), use_distributed_sampler=False)
    other = sw.plan(nn.Linear(3, 5), (torch.zeros(4, 3),), devices=2)
    with pytest.raises(PlanError, match="no module of Module has the"):
        trained(Module(), ShardwrightStrategy(other))


CHECKS = (
    trains_and_counts_as_one_process,
    local_batches_count_each_sample_once,
    stages_train_and_resume_as_one_process,
    resumes_under_another_plan,
    fabric_trains_and_resumes,
    precision_plugins_choose_the_dtype,
    model_parallel_strategy_takes_a_plan,
    refuses_what_would_be_wrong,
)

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run_checks(CHECKS)

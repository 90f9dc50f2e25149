"""A training under Ray Train that loses its workers once and goes on under another plan, compared
with one process.

python ray_ranks.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import shardwright as sw

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.frameworks_cases import BATCH, MAX_NORM, classifier, loader, optimizer_of

COUNT, EPOCHS = 64, 2
PLANS: tuple[dict[str, Any], ...] = (
    {"mode": "data_parallel", "hsdp": {"level": "level3"}},
    {"mem_coeff": 64.0},
)
"""Options of the plan before and after the workers are lost."""


def losses_of_epoch(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x, y in loader(COUNT):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss))
    return losses


def train(config: dict[str, Any]) -> None:
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    is_resumed = any(folder.glob("step-*"))
    # Each rank draws other parameters; those of rank 0 are trained.
    net = classifier(rank)
    plan = sw.plan(net, (torch.zeros(BATCH, 16),), devices=2, **PLANS[is_resumed])
    sw.parallelize(net, plan)
    optimizer = optimizer_of(net)
    position = sw.load_checkpoint(folder, net, optimizer) if is_resumed else sw.Position()
    for epoch in range(position.epoch, EPOCHS):
        losses = losses_of_epoch(net, optimizer)
        done = sw.Position(step=(epoch + 1) * len(losses), epoch=epoch + 1)
        sw.save_checkpoint(folder, net, optimizer, position=done)
        weights = folder / "weights"
        weights.mkdir(exist_ok=True)
        sw.save_state_dict(net, weights / "model.pt")
        checkpoint = Checkpoint.from_directory(str(weights)) if rank == 0 else None
        ray.train.report({"epoch": epoch, "losses": losses}, checkpoint=checkpoint)
        if not is_resumed:
            raise RuntimeError("the workers are lost")


def main(folder: Path) -> None:
    # Workers import the modules of the tests by their names.
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": paths})
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder / "checkpoints")},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    net = classifier()
    optimizer = optimizer_of(net)
    wanted = [losses_of_epoch(net, optimizer) for _ in range(EPOCHS)][-1]
    assert result.metrics is not None
    assert result.checkpoint is not None
    assert result.metrics["epoch"] == EPOCHS - 1
    found = torch.tensor(result.metrics["losses"])
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    with result.checkpoint.as_directory() as weights:
        state = torch.load(Path(weights) / "model.pt", weights_only=True)
    torch.testing.assert_close(dict(state), dict(net.state_dict()), rtol=1e-4, atol=1e-6)
    print("passed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

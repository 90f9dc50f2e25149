"""Training steps of a small language model with several shardings, for calibration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import nn

from shardwright.core.api import parallelize, plan
from shardwright.core.constraints.recompute import recompute
from shardwright.core.cost.cluster import Cluster
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.models.build import build, example_batch
from shardwright.models.expert_sharding import expert_stages, paths_of_blocks, pin_expert
from shardwright.models.sizes import Dimensions

LAYERS = MOST_STAGES = 2
FEWEST_HEADS = MOST_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Division:
    """A sharding of the model.

    Args:
        data, tensor, stages: sizes of data, tensor and pipeline parallelism.
        sharded: whether parameters are stored sharded (FSDP).
        recomputed: whether all blocks are recomputed in the backward pass.
    """

    data: int
    tensor: int = 1
    stages: int = 1
    micro_batches: int = 2
    sharded: bool = False
    recomputed: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.stages

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.micro_batches * self.devices


def divisions(processes: int) -> tuple[Division, ...]:
    """Returns the measured shardings: one device per replica, data parallelism also with FSDP and
    recomputation, tensor parallelism, stages, and their combinations."""
    mixed = [
        Division(processes // stages // tensor, tensor, stages)
        for stages in range(1, MOST_STAGES + 1)
        for tensor in range(1, MOST_TENSOR_PARALLEL + 1)
        if processes % (stages * tensor) == 0
    ]
    last = mixed[-1]
    return (
        Division(1),
        Division(1, recomputed=True),
        Division(processes, sharded=True),
        Division(processes, recomputed=True),
        *mixed,
        # More micro-batches distinguish the overhead of a pass from that of a step.
        Division(last.data, last.tensor, last.stages, micro_batches=6),
    )


class SmallModel:
    """The small model, trained by all processes of the running process group together."""

    def __init__(self, processes: int) -> None:
        self.processes, self.divisions = processes, divisions(processes)
        most = max(each.tensor for each in self.divisions)
        heads = most * ceil(FEWEST_HEADS / most)
        self.sizes = Dimensions(
            family="baichuan1",
            hidden_size=8 * heads,
            num_layers=LAYERS,
            num_heads=heads,
            num_kv_heads=heads,
            intermediate_size=16 * heads,
            vocab_size=40 * heads,
            seq_length=8 * heads,
            norm_eps=1e-5,
        )

    def pinned(self, division: Division) -> nn.Module:
        """Builds the model with pins and recomputation for a division."""
        net = build(self.sizes)
        pin_expert(
            net,
            data_parallel=division.data,
            model_parallel=division.tensor,
            seq_parallel=division.tensor > 1,
        )
        for path in paths_of_blocks(net) if division.recomputed else ():
            recompute(net.get_submodule(path))
        return net

    def divided(self, division: Division, cluster: Cluster) -> SmallTraining:
        """Plans and parallelizes the model."""
        torch.manual_seed(0)  # All processes need the same batch.
        net = self.pinned(division)
        batch = example_batch(self.sizes, division.samples)
        stages = expert_stages(net, division.stages) if division.stages > 1 else None
        decided = plan(
            net,
            batch,
            devices=division.devices,
            mode="sharding_propagation",
            cluster=cluster,
            micro_batches=division.micro_batches,
            stage_config=stages,
            hsdp={"level": "level3", "threshold": 0} if division.sharded else None,
        )
        module = parallelize(net, decided)
        assert isinstance(module, ParallelModule)
        return SmallTraining(decided, module, batch)


@dataclass(frozen=True)
class SmallTraining:
    """A parallelized small model with its batch."""

    plan: Plan
    module: ParallelModule
    batch: tuple[torch.Tensor, torch.Tensor]

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters())

    def step(self) -> None:
        """Runs forward, backward and the optimizer's update."""
        self.module.train_step(*self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

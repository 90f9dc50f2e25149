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

# A stage needs at least one block.
LAYERS = MAX_STAGES = 2
# Tensor parallelism needs at least one head per device.
MIN_HEADS = MAX_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class SmallSharding:
    """A measured parallel configuration of the small model.

    Args:
        data, tensor, stages: degrees of data, tensor and pipeline parallelism.
        micro_batches: number of micro-batches per step.
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
        """Number of samples per step."""
        # One sample per device and micro-batch.
        return self.micro_batches * self.devices


def shardings(processes: int) -> tuple[SmallSharding, ...]:
    """Return the shardings to measure with `processes` processes.

    These are one device and data parallelism, both with and without recomputation, FSDP, and all
    combinations of data, tensor and pipeline parallelism. The last combination is also measured
    with more micro-batches.
    """
    combinations = [
        SmallSharding(processes // stages // tensor, tensor, stages)
        for stages in range(1, MAX_STAGES + 1)
        for tensor in range(1, MAX_TENSOR_PARALLEL + 1)
        if processes % (stages * tensor) == 0
    ]
    # The combination with the most stages and, of those, the largest tensor-parallel degree.
    last = combinations[-1]
    return (
        SmallSharding(1),
        SmallSharding(1, recomputed=True),
        SmallSharding(processes, sharded=True),
        SmallSharding(processes, recomputed=True),
        *combinations,
        # More micro-batches distinguish the overhead of a pass from that of a step.
        SmallSharding(last.data, last.tensor, last.stages, micro_batches=6),
    )


class SmallModel:
    """Builder of a small language model for training on all processes of the process group."""

    def __init__(self, processes: int) -> None:
        self.processes, self.shardings = processes, shardings(processes)
        max_tensor_parallel = max(each.tensor for each in self.shardings)
        # A multiple of the largest tensor-parallel degree, and at least `MIN_HEADS`.
        heads = max_tensor_parallel * ceil(MIN_HEADS / max_tensor_parallel)
        # Multiples of `heads`, which every tensor-parallel degree divides.
        self.sizes = Dimensions(
            # A family that does not need `transformers`.
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

    def build_pinned(self, sharding: SmallSharding) -> nn.Module:
        """Build the model with the pins and the recomputation of a sharding."""
        net = build(self.sizes)
        pin_expert(
            net,
            data_parallel=sharding.data,
            model_parallel=sharding.tensor,
            seq_parallel=sharding.tensor > 1,
        )
        for path in paths_of_blocks(net) if sharding.recomputed else ():
            recompute(net.get_submodule(path))
        return net

    def prepare_training(self, sharding: SmallSharding, cluster: Cluster) -> SmallTraining:
        """Build the model with `sharding`, plan it for `cluster`, and parallelize it."""
        torch.manual_seed(0)  # All processes need the same batch.
        net = self.build_pinned(sharding)
        batch = example_batch(self.sizes, sharding.samples)
        stages = expert_stages(net, sharding.stages) if sharding.stages > 1 else None
        parallel_plan = plan(
            net,
            batch,
            devices=sharding.devices,
            mode="sharding_propagation",
            cluster=cluster,
            micro_batches=sharding.micro_batches,
            stage_config=stages,
            # All parameters of this model are smaller than the default threshold.
            hsdp={"level": "level3", "threshold": 0} if sharding.sharded else None,
        )
        module = parallelize(net, parallel_plan)
        assert isinstance(module, ParallelModule)
        return SmallTraining(parallel_plan, module, batch)


@dataclass(frozen=True)
class SmallTraining:
    """A small language model, parallelized for calibration, with its plan, batch and optimizer."""

    plan: Plan
    module: ParallelModule
    batch: tuple[torch.Tensor, torch.Tensor]

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters())

    def step(self) -> None:
        """Run forward, backward and optimizer step."""
        self.module.train_step(*self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

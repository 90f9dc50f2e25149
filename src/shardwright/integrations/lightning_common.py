"""Base class of the strategies of Lightning's `Trainer` and `Fabric`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from torch import Tensor

from shardwright.core.plan import Plan
from shardwright.integrations.planned_parts import PlannedModels


class PlannedModelsStrategy:
    """Mixin of a `DDPStrategy` of Lightning whose models are planned.

    Args:
        plan: the plan of the module or of one of its submodules, or the path of a plan file. None
            plans in the first call.
        save_distributed_checkpoint: whether each rank saves its shards to a folder, which any plan
            can load. By default a checkpoint is one file, as saved by
            one process.
        options: options of `sw.plan`, such as `mem_coeff`; only if `plan` is None.
    """

    root_device: torch.device
    world_size: int

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        save_distributed_checkpoint: bool = False,
        **options: Any,
    ) -> None:
        # `DDPStrategy` knows neither plans nor options of `sw.plan`.
        super().__init__()
        self._planned_models = PlannedModels(plan, options)
        self._distributed_checkpoints = save_distributed_checkpoint

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModelsStrategy:
        """Return itself: a process has one strategy, to which modules of `fabric.setup` refer.

        Copies of these modules, such as those of `AveragedModel`, are planned by it too. Its
        process groups cannot be copied.
        """
        return self

    @property
    def _sampler_arguments(self) -> dict[str, Any]:
        """Arguments with which a `DistributedSampler` selects this rank's samples."""
        shards = self._planned_models.shards
        return {"num_replicas": shards.count, "rank": shards.index}

    def process_dataloader(self, dataloader: Any) -> Any:
        return self._planned_models.check_loader(dataloader)

    def _reduce_over_distinct_samples(self, tensor: Any, reduce_op: Any) -> Any:
        # `DDPStrategy` reduces by this function too; only the group differs.
        return self._planned_models.reduce(tensor, reduce_op, _sync_ddp_if_available)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self._planned_models.all_gather(tensor, _all_gather_ddp_if_available, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        # Over all ranks, unlike `reduce`, which counts ranks with equal samples once.
        votes = _sync_ddp_if_available(votes, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: the inherited method would register the strategy names of `DDPStrategy`."""
